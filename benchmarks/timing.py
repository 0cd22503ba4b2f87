"""How long a call takes on the device, and how long it keeps the host."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from benchmarks.arms import HAS_GPU

CYCLES_PER_SECOND = 2e9  # of torch.cuda._sleep, about: today's clocks are a little below
MIN_AHEAD, MAX_AHEAD = 0.3e-3, 20e-3  # seconds that the device is kept busy before a timed call


@dataclass
class Timed:
    """Microseconds of each repeat. Without a GPU both are the wall clock."""

    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


class Timer(Protocol):
    """Two twins: CUDA events on a GPU, the wall clock on a CPU."""

    def measure(self, call: Callable[[], Any], repeats: int) -> Timed:
        """Time ``call`` on its own, warmed up, with a cold cache each time."""

    def live(self, call: Callable[[], Any], into: Timed, ahead: float = 0.0) -> Any:
        """Time one call inside a running program and return what it returns.

        Args:
            ahead: seconds of other work that the device still has when the call begins, as behind a target's forward.
                So the device's time is not the host's launch rate.
        """


class CudaTimer:
    """GPU time by CUDA events, host time by ``perf_counter``, neither waiting for the other.

    The events see what the stream does between them. A spinning kernel goes first, long enough for the host to queue
    the whole call behind it; where the call itself waits for the device, that wait is inside, as it is in real life.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event, Timed]] = []

    @cached_property
    def flush(self) -> torch.Tensor:
        """Bytes to write over, some times the L2 cache's size."""
        cache_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        return torch.empty(max(4 * cache_bytes, 256 << 20), dtype=torch.uint8, device="cuda")

    def measure(self, call: Callable[[], Any], repeats: int) -> Timed:
        timed, warm = Timed(), Timed()
        for _ in range(5):  # compiles, then settles
            self.live(call, warm)
        self.settle()
        ahead = 3 * min(warm.host) * 1e-6
        for _ in range(repeats):
            torch.cuda.synchronize()  # nothing queued: the host never stands at a full queue
            self.flush.zero_()  # every line of the L2 cache is now somebody else's
            self.live(call, timed, ahead=ahead)
            self.settle()
        return timed

    def live(self, call: Callable[[], Any], into: Timed, ahead: float = 0.0) -> Any:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if ahead:
            torch.cuda._sleep(int(min(max(ahead, MIN_AHEAD), MAX_AHEAD) * CYCLES_PER_SECOND))
        start.record()
        began = time.perf_counter()
        out = call()
        into.host.append((time.perf_counter() - began) * 1e6)
        end.record()
        self._pending.append((start, end, into))
        return out

    def settle(self) -> None:
        """Wait for the device and read the events of every call since."""
        torch.cuda.synchronize()
        for start, end, into in self._pending:
            into.device.append(start.elapsed_time(end) * 1e3)
        self._pending.clear()


class WallTimer:
    """The same on a CPU, where device and host are one."""

    def measure(self, call: Callable[[], Any], repeats: int) -> Timed:
        timed = Timed()
        self.live(call, Timed())
        for _ in range(repeats):
            self.live(call, timed)
        return timed

    def live(self, call: Callable[[], Any], into: Timed, ahead: float = 0.0) -> Any:
        began = time.perf_counter()
        out = call()
        took = (time.perf_counter() - began) * 1e6
        into.host.append(took)
        into.device.append(took)
        return out

    def settle(self) -> None:
        """Nothing is pending."""


def timer() -> CudaTimer | WallTimer:
    """The twin that this machine can use."""
    return CudaTimer() if HAS_GPU else WallTimer()


def copy_bandwidth(clock: CudaTimer | WallTimer, device: str) -> float:
    """Bytes a second that a plain copy on the device moves, what it reads and what it writes both counted."""
    half = (1 << 30) if device == "cuda" else (1 << 22)
    source = torch.empty(half, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    times = sorted(clock.measure(lambda: target.copy_(source), 15).device)
    return 2 * half / (times[len(times) // 2] * 1e-6)
