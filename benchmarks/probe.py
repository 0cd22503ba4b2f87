"""A live engine's draft steps, timed and traced where they happen: around ``drafter.propose``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.arms import HAS_GPU
from benchmarks.timing import Timer, Times, profiled

AHEAD = 10e-3  # seconds of other work on the device before a "behind" step: more than any arm's host time


@dataclass
class Steps:
    """The draft steps of full decode batches.

    Attributes:
        behind: begun while the device was busy, as behind a real target's forward: its time is the device's own.
        idle: begun on an idle device: its time holds the launch gaps, and the host's is free of any queue.
        traced: the CUDA calls of one step more, under the profiler, whose own cost would spoil its time.
    """

    behind: Times = field(default_factory=Times)
    idle: Times = field(default_factory=Times)
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
def watched(drafter: Any, timer: Timer, batch: int, k: int, repeats: int, warm: int) -> Iterator[Steps]:
    """Time the decode steps of full batches: after ``warm`` of them ``repeats`` of each kind, then the traced one."""
    propose, steps, seen = drafter.propose, Steps(), 0

    def step(call: Callable[[], Any]) -> Any:
        if seen <= warm:
            return call()
        if seen <= warm + repeats:
            return timer.live(call, steps.behind, ahead=AHEAD)
        if seen <= warm + 2 * repeats:
            if HAS_GPU:
                torch.cuda.synchronize()
            return timer.live(call, steps.idle)
        if HAS_GPU and steps.traced is None:
            out, steps.traced = profiled(call)
            return out
        return call()

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
        timer.settle()
    if seen < num_steps(repeats, warm):
        raise RuntimeError(f"only {seen} decode steps with all {batch} requests, {num_steps(repeats, warm)} needed")
