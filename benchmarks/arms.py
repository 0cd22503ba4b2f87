"""What the benchmark scripts share: the environment of an arm, samples summed up, tables.

``python -m benchmarks.arms MODULE FUNCTION ARGUMENTS`` calls a function in a process of its own (``call``).
"""

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peagle_tools.train.lines import add_line

ROOT = Path(__file__).resolve().parent.parent
HAS_GPU = torch.cuda.is_available()
# Limits of processes are for a GPU host's 16 cores; times this on one with fewer.
SLOWER = max(1, 16 // (os.cpu_count() or 1)) if HAS_GPU else 1

# The same for every arm, whatever the caller's own environment says.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the arm's own process, to look inside
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # not on every host, and no arm's advantage
    # Every arm is on this machine, which may have no other network.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
ON_CPU = {
    "OMP_NUM_THREADS": "1",  # one thread is fastest on models this small
    # What is compiled ahead of time cannot be loaded again on a CPU ("no attribute 'finalize_loading'", vLLM 0.33 too),
    # so every start would compile again; Inductor's own cache works.
    "VLLM_USE_AOT_COMPILE": "0",
}
CELLS = "PEAGLE_CELLS"  # names the file that a process writes finished cells, or tests, to
# An arm's runner; Model Runner V2 needs Triton's interpreter where there is no GPU.
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"} | ({} if HAS_GPU else {"TRITON_INTERPRET": "1"})
STOCK = {"PEAGLE_VLLM_DISABLE": "1"}
NOT_INHERITED = ("VLLM_USE_V2_MODEL_RUNNER", "PEAGLE_VLLM_DISABLE", "TRITON_INTERPRET")


def environment(env: dict[str, str]) -> dict[str, str]:
    """All of the environment of an arm whose own variables are ``env``."""
    inherited = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
    return inherited | ENVIRONMENT | ({} if HAS_GPU else ON_CPU) | env


def call(function: Callable[..., Any], **arguments: Any) -> tuple[str, ...]:
    """What follows ``python -m`` to call ``function`` in another process; each cell that it yields is kept at once."""
    return ("benchmarks.arms", function.__module__, function.__name__, json.dumps(arguments))


def keep(cell: dict[str, Any]) -> None:
    add_line(Path(os.environ[CELLS]), cell)


def summary(samples: Iterable[float], digits: int = 2) -> dict[str, Any]:
    """Median and spread (10th and 90th percentile), in the unit given."""
    values = [*samples]
    p10, p90 = np.percentile(values, (10, 90), method="nearest")  # of two samples, these
    return {name: round(float(x), digits) for name, x in {"median": np.median(values), "p10": p10, "p90": p90}.items()}


def table(cells: Sequence[dict[str, Any]]) -> str:
    """Aligned text: a line for each cell under its keys, with the median and the spread of a ``summary``."""
    columns = list(dict.fromkeys(key for cell in cells for key in cell))
    lines = [columns, *([_text(cell.get(column, "")) for column in columns] for cell in cells)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "{median:g} ({p10:g}-{p90:g})".format(**value)
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    module, name, arguments = sys.argv[1:]
    for cell in getattr(importlib.import_module(module), name)(**json.loads(arguments)):
        keep(cell)
