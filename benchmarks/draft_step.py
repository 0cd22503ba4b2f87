"""A live engine's draft steps, timed and traced around ``drafter.propose``, and the bytes that one moves at least."""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.arms import HAS_GPU
from benchmarks.shapes import NUM_AUX, HeadShape

BF16 = 2  # bytes

# Of ``torch.cuda._sleep``, some 10 ms: the device is busy until the host, of any arm, has queued the whole step.
AHEAD_CYCLES = 20_000_000
# The CUDA runtime's and driver's calls, by the name that the trace gives them. A wait for the whole device is not
# among them: the profiler makes those itself.
CALLS = {
    "kernel_launches": re.compile(r"cu(da)?Launch(Cooperative)?Kernel"),
    "graph_launches": re.compile(r"cu(da)?GraphLaunch"),
    "copies": re.compile(r"cu(da)?(Memcpy|Memset)"),
    "waits": re.compile(r"cu(da)?(Stream|Event)Synchronize"),
}


@dataclass
class Steps:
    """The draft steps of full decode batches, in microseconds. Without a GPU both are the wall clock's.

    Attributes:
        device: of steps that begin while the device is busy, as behind a real target's forward: no launch gaps.
        host: of steps that begin on an idle device: no full queue.
        traced: the CUDA calls of one step more, under the profiler, whose own cost would spoil its time.
    """

    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    traced: dict[str, int] | None = None


def num_steps(repeats: int, warm: int) -> int:
    """Decode steps that ``watched`` needs."""
    return warm + 2 * repeats + HAS_GPU


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
def watched(drafter: Any, batch: int, k: int, repeats: int, warm: int) -> Iterator[Steps]:
    """Time the decode steps of full batches: after ``warm`` of them ``repeats`` of each kind, then the traced one."""
    propose, steps = drafter.propose, Steps()
    seen = 0
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def step(call: Callable[[], Any]) -> Any:
        if HAS_GPU and warm < seen <= warm + repeats:
            torch.cuda._sleep(AHEAD_CYCLES)
            events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            events[-1][0].record()
            out = call()
            events[-1][1].record()
        elif HAS_GPU and seen == num_steps(repeats, warm):
            out, steps.traced = profiled(call)
        elif warm < seen <= warm + 2 * repeats:
            if HAS_GPU:
                torch.cuda.synchronize()
            began = time.perf_counter()
            out = call()
            (steps.device if seen <= warm + repeats else steps.host).append((time.perf_counter() - began) * 1e6)
        else:
            out = call()
        return out

    def timed_propose(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        if not is_full_decode(args, kwargs, batch, k):
            return propose(*args, **kwargs)
        seen += 1
        return step(lambda: propose(*args, **kwargs))

    drafter.propose = timed_propose
    try:
        yield steps
    finally:
        del drafter.propose
    if seen < num_steps(repeats, warm):
        raise RuntimeError(f"only {seen} decode steps with all {batch} requests, {num_steps(repeats, warm)} needed")
    if events:
        torch.cuda.synchronize()
        steps.device = [1e3 * start.elapsed_time(end) for start, end in events]


def profiled(call: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """What ``call`` returns, and how many of each of CALLS it made."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        out = call()
        torch.cuda.synchronize()
    return out, count(e.name for e in trace.events() or [] if e.device_type == torch.autograd.DeviceType.CPU)


def count(names: Iterable[str]) -> dict[str, int]:
    """The CALLS among these events of a trace."""
    names = list(names)
    return {kind: sum(bool(pattern.match(name)) for name in names) for kind, pattern in CALLS.items()}


def draft_step_roofline(head: HeadShape, k: int, batch: int, *, parallel: bool) -> dict[str, int]:
    """Bytes to and from the device's memory, by part of the step of a decode batch, whatever was accepted.

    Weights once a forward (norms, biases and embedding rows left out); P-EAGLE: 2K rows a request in the layers, K + 1
    in ``fc``. EAGLE-3: K forwards of one layer, of one row a request each (vLLM's first has K + 1). Keys, values and
    logits are left out.

    Args:
        k: drafts of each request.
        batch: requests.
        parallel: one forward of the P-EAGLE head; False: K forwards of an EAGLE-3 head of the same width.
    """
    weights, forwards = head.weights(parallel), 1 if parallel else k
    captured, rows = (batch * (k + 1), 2 * batch * k) if parallel else (batch, batch * k)
    return {
        "fc": BF16 * weights["fc"],
        "layers": BF16 * forwards * weights["layers"],
        "lm_head": BF16 * forwards * weights["lm_head"],
        "hidden states": BF16 * (NUM_AUX * captured + rows) * head.target.hidden_size,
    }
