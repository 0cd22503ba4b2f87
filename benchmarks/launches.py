"""What a call asks of the GPU, as torch's profiler saw it: launches are read from the trace, never counted by hand."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

# The CUDA runtime's and driver's calls, by the name that the trace gives them. A wait for the whole device is not
# among them: the profiler makes those itself.
CALLS = {
    "kernel_launches": re.compile(r"cu(da)?Launch(Cooperative)?Kernel"),
    "graph_launches": re.compile(r"cu(da)?GraphLaunch"),
    "copies": re.compile(r"cu(da)?(Memcpy|Memset)"),
    "waits": re.compile(r"cu(da)?(Stream|Event)Synchronize"),
}


def profiled(call: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What ``call`` returns, and what it asked of the GPU.

    Beside CALLS: ``device_kernels``, kernels that the device ran, those inside graphs included, and
    ``device_busy_us``, the sum of their times.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        out = call()
        torch.cuda.synchronize()
    events = trace.events() or []
    ran = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [e for e in ran if not e.name.startswith(("Memcpy", "Memset")) and not _is_annotation(e)]
    seen: dict[str, float] = dict(count(e.name for e in events if e.device_type == torch.autograd.DeviceType.CPU))
    seen["device_kernels"] = len(kernels)
    seen["device_busy_us"] = round(sum(e.time_range.elapsed_us() for e in kernels), 2)
    return out, seen


def _is_annotation(event: Any) -> bool:
    return bool(getattr(event, "is_user_annotation", False))


def count(names: Iterable[str]) -> dict[str, int]:
    """The CALLS among these events of a trace."""
    names = list(names)
    return {kind: sum(bool(pattern.match(name)) for name in names) for kind, pattern in CALLS.items()}


def shown(seen: dict[str, Any] | None) -> str:
    """For a table: kernels launched, graphs launched, copies; or what a CPU's dispatcher counted."""
    if seen is None:
        return "-"
    if "operations" in seen:
        return f"{seen['operations']}op+{seen['launches']}t"
    return f"{seen['kernel_launches']}k+{seen['graph_launches']}g+{seen['copies']}c"
