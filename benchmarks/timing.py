"""How long a call takes on the device, and how fast the device copies."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.arms import HAS_GPU

REPEATS = 5  # without a GPU


def device_us(call: Callable[[], Any]) -> list[float]:
    """Microseconds of each repeat on the device, warmed up and with a cold L2 cache; without a GPU the wall clock's.

    What empties the cache (100 microseconds on an H100) is also what the host queues a short call behind.
    """
    if HAS_GPU:
        from triton.testing import do_bench

        return [1e3 * ms for ms in do_bench(call, return_mode="all")]
    call()
    times = [time.perf_counter()]
    for _ in range(REPEATS):
        call()
        times.append(time.perf_counter())
    return list(1e6 * np.diff(times))


def copy_bandwidth() -> float:
    """Bytes a second that a plain copy on the device moves, what it reads and what it writes both counted."""
    half, device = ((1 << 28), "cuda") if HAS_GPU else ((1 << 22), "cpu")
    source = torch.empty(half, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * half / (float(np.median(device_us(lambda: target.copy_(source)))) * 1e-6)
