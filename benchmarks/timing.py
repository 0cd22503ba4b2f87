"""How long a call takes on the device, how long it keeps the host, and what it launches."""

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from benchmarks.arms import HAS_GPU

CYCLES_PER_SECOND = 2e9  # of torch.cuda._sleep, about: today's clocks are a little below
MIN_AHEAD, MAX_AHEAD = 0.3e-3, 20e-3  # seconds that the device is kept busy before a timed call
# The CUDA runtime's and driver's calls, by the name that the trace gives them. A wait for the whole device is not
# among them: the profiler makes those itself.
CALLS = {
    "kernel_launches": re.compile(r"cu(da)?Launch(Cooperative)?Kernel"),
    "graph_launches": re.compile(r"cu(da)?GraphLaunch"),
    "copies": re.compile(r"cu(da)?(Memcpy|Memset)"),
    "waits": re.compile(r"cu(da)?(Stream|Event)Synchronize"),
}


@dataclass
class Times:
    """Microseconds of each repeat. Without a GPU both are the wall clock."""

    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


class Timer:
    """GPU time by CUDA events, host time by ``perf_counter``, neither waiting for the other; the wall clock on a CPU.

    The events see what the stream does between them. A spinning kernel goes first, long enough for the host to queue
    the whole call behind it (``triton.testing.do_bench`` has no such kernel, so a call that the host launches slowly
    would be timed by the host); where the call itself waits for the device, that wait is inside, as in real use.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event, Times]] = []

    @cached_property
    def flush(self) -> torch.Tensor:
        """Bytes to write over, some times the L2 cache's size."""
        cache_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        return torch.empty(max(4 * cache_bytes, 256 << 20), dtype=torch.uint8, device="cuda")

    def measure(self, call: Callable[[], Any], repeats: int) -> Times:
        """Time ``call`` on its own, warmed up, with a cold L2 cache each time."""
        times, warm = Times(), Times()
        for _ in range(5 if HAS_GPU else 1):  # compiles, then settles
            self.live(call, warm)
        self.settle()
        for _ in range(repeats):
            if HAS_GPU:
                torch.cuda.synchronize()  # nothing queued: the host never stands at a full queue
                self.flush.zero_()
            self.live(call, times, ahead=3 * min(warm.host) * 1e-6)
            self.settle()
        return times

    def live(self, call: Callable[[], Any], into: Times, ahead: float = 0.0) -> Any:
        """Time one call inside a running program and return what it returns.

        Args:
            into: gets the host's time at once, the device's with ``settle``.
            ahead: seconds of other work that the device still has when the call begins, as behind a target's forward.
                So the device's time is not the host's launch rate.
        """
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if HAS_GPU else []
        if events and ahead:
            torch.cuda._sleep(int(min(max(ahead, MIN_AHEAD), MAX_AHEAD) * CYCLES_PER_SECOND))
        if events:
            events[0].record()
        began = time.perf_counter()
        out = call()
        into.host.append((time.perf_counter() - began) * 1e6)
        if events:
            events[1].record()
            self._pending.append((*events, into))
        else:
            into.device.append(into.host[-1])
        return out

    def settle(self) -> None:
        """Wait for the device and read the events of every call since."""
        if self._pending:
            torch.cuda.synchronize()
        for start, end, into in self._pending:
            into.device.append(start.elapsed_time(end) * 1e3)
        self._pending.clear()


def copy_bandwidth(timer: Timer) -> float:
    """Bytes a second that a plain copy on the device moves, what it reads and what it writes both counted."""
    half, device = ((1 << 30), "cuda") if HAS_GPU else ((1 << 22), "cpu")
    source = torch.empty(half, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * half / (float(np.median(timer.measure(lambda: target.copy_(source), 15).device)) * 1e-6)


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


def as_text(calls: dict[str, Any] | None) -> str:
    """For a table: kernels launched, graphs launched, copies."""
    return f"{calls['kernel_launches']}k+{calls['graph_launches']}g+{calls['copies']}c" if calls else "-"
