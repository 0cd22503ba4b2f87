"""How long a call, and the draft steps of a live engine, take on the device, and how fast the device copies."""

import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.arms import HAS_GPU

REPEATS = 5  # without a GPU
STEPS, WARM = (30, 5) if HAS_GPU else (3, 1)
# Of ``torch.cuda._sleep``, some 10 ms: the device is busy until the host, of any arm, has queued the whole step.
AHEAD_CYCLES = 20_000_000


def device_us(call: Callable[[], Any]) -> list[float]:
    """Microseconds of each repeat on the device, warmed up and with a cold L2 cache; without a GPU the wall clock's.

    What empties the cache (100 microseconds on an H100) is also what the host queues a short call behind.
    """
    if HAS_GPU:
        from triton.testing import do_bench

        return [1e3 * ms for ms in do_bench(call, return_mode="all")]
    call()
    return [1e6 * seconds for seconds in timeit.repeat(call, number=1, repeat=REPEATS)]


def copy_bandwidth() -> float:
    """Bytes a second that a plain copy on the device moves, what it reads and what it writes both counted."""
    half, device = ((1 << 28), "cuda") if HAS_GPU else ((1 << 22), "cpu")
    source = torch.empty(half, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * half / (float(np.median(device_us(lambda: target.copy_(source)))) * 1e-6)


@dataclass
class Steps:
    """The draft steps of full decode batches, in microseconds. Without a GPU both are the wall clock's."""

    # Of steps that begin while the device is busy, as behind a real target's forward: no launch gaps.
    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)  # of steps that begin on an idle device: no full queue


def is_full_decode(args: tuple[Any, ...], kwargs: dict[str, Any], batch: int, k: int) -> bool:
    """Whether ``propose`` is called for a decode batch of ``batch`` requests, on either runner."""
    if kwargs.get("dummy_run"):
        return False
    if (cad := kwargs.get("common_attn_metadata")) is not None:  # V1
        return cad.batch_size() == batch and cad.max_query_len == k + 1
    input_batch = kwargs["input_batch"] if "input_batch" in kwargs else args[0]  # V2
    scheduled = input_batch.num_scheduled_tokens[: input_batch.num_reqs]
    return input_batch.num_reqs == batch and bool((scheduled == k + 1).all())


@contextmanager
def watched(drafter: Any, batch: int, k: int) -> Iterator[Steps]:
    """Time the decode steps of full batches: after ``WARM`` of them ``STEPS`` of each kind."""
    propose, steps = drafter.propose, Steps()
    kinds = ["warm"] * WARM + ["device"] * STEPS + ["host"] * STEPS
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def timed_propose(*args: Any, **kwargs: Any) -> Any:
        call = partial(propose, *args, **kwargs)
        kind = kinds.pop(0) if kinds and is_full_decode(args, kwargs, batch, k) else "warm"
        if kind == "warm":
            return call()
        if kind == "device" and HAS_GPU:
            torch.cuda._sleep(AHEAD_CYCLES)
            events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            events[-1][0].record()
            out = call()
            events[-1][1].record()
            return out
        if HAS_GPU:
            torch.cuda.synchronize()
        began = time.perf_counter()
        out = call()
        (steps.device if kind == "device" else steps.host).append((time.perf_counter() - began) * 1e6)
        return out

    drafter.propose = timed_propose
    try:
        yield steps
    finally:
        del drafter.propose
    if kinds:
        raise RuntimeError(f"too few decode steps with all {batch} requests: {len(kinds)} more are needed")
    if events:
        torch.cuda.synchronize()
        steps.device = [1e3 * start.elapsed_time(end) for start, end in events]
