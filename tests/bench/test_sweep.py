"""Sweeps with stand-ins for server and client: whole, killed, resumed, with all going wrong; bench.yml's steps."""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import yaml

from peagle_tools.bench.cells import Cell, grid, read_results
from peagle_tools.bench.suite import Suite
from peagle_tools.shared.checked_yaml import read_yaml
from peagle_tools.shared.processes import failure_reason, how_it_ended
from tests.support.serving import ROOT


class Trial:
    """One suite, one results folder, and the stand-ins' log."""

    def __init__(self, suite: Path):
        self.suite, folder = suite, suite.parent.parent
        self.results, self.log = folder / "results", folder / "log"
        self.log.touch()

    def start(self, **environment: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "tests.bench.standin.sweep", "bench", "run", self.suite, "--results", self.results],
            cwd=ROOT,
            env=os.environ | {"STANDIN_LOG": str(self.log)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A job in the background starts its children with SIGINT ignored, and they would keep to that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, status: int = 0, **environment: str) -> str:
        """What it prints, ended with this status; no process is left."""
        process = self.start(**environment)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == status, output
        self.assert_nothing_runs()
        return output

    def lines(self, word: str) -> list[str]:
        """What the stand-ins wrote after ``word``."""
        return [line.split(" ", 1)[1] for line in self.log.read_text().splitlines() if line.startswith(word + " ")]

    def wait_for(self, word: str, count: int = 1) -> None:
        deadline = time.monotonic() + 30
        while len(self.lines(word)) < count:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def cells(self) -> list[Cell]:
        return grid(read_yaml(self.suite, Suite, "suite"))

    def written(self) -> dict[str, int]:
        """When each cell was written."""
        return {file.name: file.stat().st_mtime_ns for file in (self.results / "cells").glob("*.json")}

    def change(self, old: str, new: str) -> None:
        text = self.suite.read_text()
        assert old in text
        self.suite.write_text(text.replace(old, new))

    def assert_nothing_runs(self) -> None:
        deadline = time.monotonic() + 10
        pids = {int(pid) for word in ("server", "client") for pid in self.lines(word)}
        while alive := {p.pid for p in psutil.process_iter(["status"]) if p.info["status"] != "zombie"} & pids:
            assert time.monotonic() < deadline, f"{len(alive)} of {len(pids)} processes were left behind"
            time.sleep(0.1)


@pytest.fixture
def trial(small_suite_file: Path) -> Trial:
    return Trial(small_suite_file)


def one_line(output: str) -> str:
    """The error line; there must be exactly one, and no traceback."""
    assert "Traceback" not in output
    errors = [line for line in output.splitlines() if line.startswith("peagle-vllm: ")]
    assert len(errors) == 1, output
    return errors[0]


def test_killed_twice(trial: Trial) -> None:
    """Servers and clients end with the sweep, even where it cannot end them; whole cells are not measured again."""
    trial.change("repeats: 2", "repeats: 4")
    whole: dict[str, int] = {}
    for seconds in (0.4, 1.0):
        starts = len(trial.lines("server"))
        process = trial.start()
        trial.wait_for("server", starts + 1)  # imports take as long as the machine is busy; kill a sweep
        time.sleep(seconds)
        assert process.poll() is None, "the sweep ended before it was killed: give it more repeats"
        process.kill()
        process.communicate(timeout=60)
        trial.assert_nothing_runs()
        assert whole.items() <= trial.written().items(), "a cell was measured again, or is gone"
        whole = trial.written()
    trial.run()
    assert Counter(r.cell for r in read_results(trial.results).cells) == Counter(trial.cells())
    assert whole.items() <= trial.written().items()
    assert len(trial.lines("measured")) <= len(trial.cells()) + 2  # at most the one that each kill threw away


@pytest.mark.parametrize(
    ("standin", "client", "is_ok", "reason"),
    [
        ("dies:2", "", [True, True, True, False], "the server ended (exit status 1): ValueError: out of everything"),
        # It answers with errors for a while. The client's complaint is not the cause, and the next cell gets a new one.
        ("sickens:1", "half", [True, True, False, False], "Engine core proc EngineCore_DP0 died unexpectedly"),
        ("no-start", "", [True, True, False, False], "ValueError: the head is 64 wide, the target 128"),
    ],
)
def test_a_server_that_fails(trial: Trial, standin: str, client: str, is_ok: list[bool], reason: str) -> None:
    """In the midst of a cell, its engine alone, or before it listens: the cells that it cost say why."""
    trial.change("    k: [3]\n", f'    k: [3]\n    environment: {{STANDIN: "{standin}"}}\n')
    trial.change("repeats: 2", "repeats: 1")
    output = trial.run(1, STANDIN_CLIENT_FOR_EAGLE=client)
    results, log = read_results(trial.results).cells, trial.results / "logs/eagle-3-k3-prompts-c1-r1-server.log"
    assert [r.ok for r in results] == is_ok and all(reason in r.reason for r in results if not r.ok)
    assert f"{is_ok.count(False)} of 4 cells failed" in output
    assert f"  its log: {log}\n" in output and log.exists()


def test_a_prefix_cache_that_is_not_emptied(trial: Trial) -> None:
    trial.change("    k: [3]\n", '    k: [3]\n    environment: {STANDIN: "full:13"}\n')
    trial.change("repeats: 2", "repeats: 1")
    assert trial.run(1).count("FAILED: the server did not empty its prefix cache: its blocks are in use") == 1


def test_a_client_that_fails_and_then_does_not(trial: Trial) -> None:
    trial.change("repeats: 2", "repeats: 1")
    assert "the same command tries them again" in trial.run(1, STANDIN_CLIENT="fails", STANDIN_CLIENT_FOR_EAGLE="half")
    reasons = {r.cell.arm: r.reason for r in read_results(trial.results).cells}
    assert "FileNotFoundError: no such" in reasons["none"]
    assert "6 of 12 requests were answered: Connect" in reasons["EAGLE-3"]
    trial.run()
    assert all(r.ok for r in read_results(trial.results).cells)


def test_two_sweeps_in_one_folder(trial: Trial) -> None:
    first = trial.start(STANDIN_CLIENT="slow")
    try:
        trial.wait_for("client")
        assert "another sweep is writing into results" in one_line(trial.run(2))
    finally:
        first.send_signal(signal.SIGINT)
        output, _ = first.communicate(timeout=60)
    assert first.returncode == 130 and "interrupted" in one_line(output)
    trial.assert_nothing_runs()


def test_a_whole_sweep_is_continued_by_its_like_only(trial: Trial) -> None:
    """More repeats, or more time, are the same suite."""
    output = trial.run()
    results = read_results(trial.results).cells
    assert Counter(r.cell for r in results) == Counter(trial.cells()) and all(r.ok for r in results)
    assert "[8/8] EAGLE-3 K=3, prompts, c=4, repeat 2: " in output and output.count("about 0 min left") == 8
    starts = [line for line in output.splitlines() if line.startswith("starting")]
    order = ["none, repeat 1", "EAGLE-3 K=3, repeat 1", "none, repeat 2", "EAGLE-3 K=3, repeat 2"]
    assert [line.removeprefix("starting ").removesuffix(" ...") for line in starts] == order

    trial.change("repeats: 2", "repeats: 3\ncell_seconds: 7200")
    assert "[12/12] " in trial.run() and len(trial.lines("measured")) == 12
    trial.change("output_tokens: 64", "output_tokens: 32")
    assert "begun with other suite (datasets)" in one_line(trial.run(2))
    trial.change("output_tokens: 32", "output_tokens: 64")
    prompts = trial.suite.parent / "prompts.jsonl"
    text = prompts.read_text()
    prompts.write_text(2 * text)
    assert "begun with other prompts (prompts)" in one_line(trial.run(2))
    prompts.write_text("{")
    assert "prompts.jsonl:1 is not valid JSON; write " in one_line(trial.run(2))
    prompts.write_text(text)
    assert "begun with other variables (PEAGLE_VLLM_ACCEPT)" in one_line(trial.run(2, PEAGLE_VLLM_ACCEPT="gate"))
    (head := trial.suite.parent / "eagle/model.safetensors").write_text("another head")
    assert "begun with other models (./eagle)" in one_line(trial.run(2))
    head.unlink()
    sweep = trial.results / "sweep.json"
    sweep.write_text(sweep.read_text().replace('"torch": "', '"torch": "another'))
    assert "begun with other versions (torch)" in one_line(trial.run(2))
    for text in ("{", '{"suite": {}}'):
        sweep.write_text(text)
        assert "sweep.json: not from `bench run`" in one_line(trial.run(2))


LOGS = {
    "pydantic's own words": (
        [
            "(APIServer pid=1) pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig",
            "(APIServer pid=1)   Value error, K is too large for this head [type=value_error, input_value=..., ...]",
            "(APIServer pid=1)     For further information visit https://errors.pydantic.dev/2/v/value_error",
        ],
        "K is too large for this head",
    ),
    "a rank's error before a warning": (
        ["[rank0]: ValueError: no such backend", "WARNING 11-26 04:00:00 [a.py:1] Tokenizer not available"],
        "ValueError: no such backend",
    ),
    "only an echo": (["x.EngineDeadError: EngineCore encountered an issue.", "bye"], "x.EngineDeadError: EngineCore"),
    "no error at all": (["one", "two", ""], "two"),
    "nothing": ([], "it wrote nothing"),
}


@pytest.mark.parametrize("name", LOGS)
def test_failure_reason(name: str, tmp_path: Path) -> None:
    lines, words = LOGS[name]
    log = tmp_path / "log"
    log.write_text("\n".join(lines))
    assert failure_reason(log).startswith(words)


def test_how_it_ended() -> None:
    assert [how_it_ended(status) for status in (1, -9)] == ["exit status 1", "killed by SIGKILL"]


def test_what_loses_a_sigterm_is_killed_after_its_parent(tmp_path: Path) -> None:
    """As vLLM loses one that comes while its engine starts."""
    deaf = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(60)"
    starts = f"""
import sys, time
from pathlib import Path
from peagle_tools.shared import processes

processes.PATIENCE = 0.1
processes.start([sys.executable, "-c", {deaf!r}], cwd=Path.cwd(), env={{}}, log=Path({str(tmp_path / "log")!r}))
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", starts])
    while not (pid := (tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""):
        assert parent.poll() is None
        time.sleep(0.1)
    child = psutil.Process(int(pid))
    parent.kill()
    parent.wait()
    assert not psutil.wait_procs([child], 20)[1]


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
