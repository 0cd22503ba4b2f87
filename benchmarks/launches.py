"""What a call launches on the GPU, as torch's profiler saw it: read from the trace, never counted by hand."""

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
    """For a table: kernels launched, graphs launched, copies; or what a CPU's dispatcher counted."""
    if calls is None:
        return "-"
    if "operations" in calls:
        return f"{calls['operations']}op+{calls['launches']}t"
    return f"{calls['kernel_launches']}k+{calls['graph_launches']}g+{calls['copies']}c"
