"""The wheel, installed into a clean environment and used from another folder."""

import json
import os
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.models import PEAGLE, TARGET
from tests.support.serving import ROOT


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "uv", "build", "--wheel", "--quiet", "--out-dir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"peagle_vllm", "peagle_tools", "peagle_kernels"}
    data = ["peagle_vllm/patches/fingerprints.json", "peagle_tools/shared/prompts.txt"]
    for name in ("peagle_vllm/py.typed", "peagle_kernels/py.typed", *data):
        assert name in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    lines = zipfile.ZipFile(wheel).read(metadata).decode().splitlines()
    required = [line for line in lines if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert required and not [line for line in required if "vllm" in line or "torch" in line], "no hard dependency"


SERVE = f"""
from vllm import LLM, SamplingParams
head = {{"method": "eagle3", "model": {str(PEAGLE)!r}, "num_speculative_tokens": 3, "parallel_drafting": True}}
llm = LLM({str(TARGET)!r}, speculative_config=head, dtype="float32", enforce_eager=True, max_model_len=64,
          kv_cache_memory_bytes=16 << 20)
llm.generate(["import os"], SamplingParams(max_tokens=8), use_tqdm=False)
import json, sys
runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
print(json.dumps({{
    "drafter": type(runner.drafter).__name__,
    "plugin": sys.modules["peagle_vllm"].__file__,
    "tools": [name for name in sys.modules if name.startswith("peagle_tools")],
}}))
"""


def test_it_serves_without_the_tools(wheel: Path, tmp_path: Path) -> None:
    """In a new environment, which borrows this one's dependencies, vLLM finds the plugin by itself, loads a head and
    drafts; no module of peagle_tools is imported. The command line starts."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    run(sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--python", python, wheel, cwd=tmp_path)
    packages = run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).stdout.strip()
    # Behind the environment's own packages, and without what makes the work tree importable.
    Path(packages, "borrowed.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    served = json.loads(run(python, "-c", SERVE, cwd=tmp_path).stdout.splitlines()[-1])
    assert served["drafter"] == "ParallelEagleProposer" and served["plugin"].startswith(packages)
    assert served["tools"] == []
    assert "doctor" in run(python.with_name("peagle-vllm"), "--help", cwd=tmp_path).stdout
