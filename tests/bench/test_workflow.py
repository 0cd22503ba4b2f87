"""bench.yml's B200 job: its shell steps from the sweep to the gate, with stand-ins for gh, server and client."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from peagle_tools.bench.cells import read_results
from peagle_tools.bench.suite import Suite
from peagle_tools.shared.checked_yaml import read_yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/bench.yml").read_text())
JOB = WORKFLOW["jobs"]["b200"]
NAME = "trial-vllm-0.33.0"
GIVEN = {"VLLM": "0.33.0", "SUITE": "trial", "NAME": NAME, "RESUME": "", "GH_TOKEN": "", "OPTIONS": ""}


@pytest.fixture
def checkout(tmp_path: Path, small_suite_file: Path) -> Path:
    """A folder like the repository, whose command has the stand-ins; ``gh release download`` copies from releases/."""
    text = small_suite_file.read_text().replace("repeats: 2", "repeats: 1\nserve: {flags: --dtype float32}")
    small_suite_file.write_text(text)
    folder = tmp_path / "checkout"
    shutil.copytree(small_suite_file.parent, folder / "benchmarks/suites")
    shutil.copy(ROOT / "benchmarks/baselines.txt", folder / "benchmarks/baselines.txt")
    (folder / "releases").mkdir()
    for tool, line in {
        ".venv/bin/peagle-vllm": f'exec {sys.executable} -m tests.bench.standin.sweep "$@"',
        "bin/gh": 'cp releases/"$5" .',  # gh release download TAG --pattern FILE --clobber
    }.items():
        (folder / tool).parent.mkdir(parents=True)
        (folder / tool).write_text(f"#!/bin/bash\n{line}\n")
        (folder / tool).chmod(0o755)
    return folder


def step(checkout: Path, name: str, standin: str = "") -> tuple[bool, str]:
    """Whether a step passes, and what it prints."""
    assert set(JOB["env"]) == set(GIVEN), "the job's variables; the shell has no others"
    (text,) = (step["run"] for step in JOB["steps"] if step.get("name") == name)
    assert "${{" not in text
    more = {
        "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT / "kernels", ROOT))),
        "STANDIN_LOG": str(checkout / "log"),
        "STANDIN_CLIENT": standin,
    }
    bash = ["bash", "--noprofile", "--norc", "-euo", "pipefail", "-c", text]
    env = os.environ | GIVEN | more
    done = subprocess.run(bash, cwd=checkout, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode == 0, done.stdout + done.stderr


def test_the_default_options_fit_each_suite() -> None:
    inputs = WORKFLOW[True]["workflow_dispatch"]["inputs"]  # YAML's `on`
    chosen = re.findall(r"--(\S+) (\S+)", inputs["options"]["default"])
    for name in inputs["suite"]["options"]:
        suite = read_yaml(ROOT / f"benchmarks/suites/{name}.yaml", Suite, "suite")
        depths = {str(k) for arm in suite.arms.values() for k in arm.k}
        has = {"arm": suite.arms, "k": depths, "concurrency": {*map(str, suite.concurrency)}}
        assert all(value in has[option] for option, value in chosen)


def test_the_gate(checkout: Path) -> None:
    """No baseline fails; a run becomes it; the same again passes, a slower one fails; so does another archive."""
    results, archive = checkout / "results" / NAME, checkout / f"releases/{NAME}.tar.gz"
    assert step(checkout, "run")[0] and all(r.ok for r in read_results(results).cells)
    passed, printed = step(checkout, "the pinned baseline")
    assert not passed and "pins no trial-vllm-0.33.0.tar.gz" in printed
    with tarfile.open(archive, "w:gz") as tar:  # as docs/bench.md says
        tar.add(results, ".")
    with (checkout / "benchmarks/baselines.txt").open("a") as pins:
        pins.write(f"{hashlib.sha256(archive.read_bytes()).hexdigest()}  {archive.name}\n")
    for standin, text in {"1.03": "0 of 4 cells are worse", "1.07": "tokens/s "}.items():
        shutil.rmtree(results)
        assert step(checkout, "run", standin)[0] and step(checkout, "the pinned baseline")[0]
        passed, printed = step(checkout, "gate")
        assert passed == (standin == "1.03") and text in printed
    archive.write_bytes(archive.read_bytes() + b"another")
    passed, printed = step(checkout, "the pinned baseline")
    assert not passed and "FAILED" in printed
