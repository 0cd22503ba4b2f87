"""Sweeps with stand-ins for server and client: whole, killed, resumed, and with everything going wrong."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from peagle_tools.bench.cells import Cell, grid, read_results
from peagle_tools.bench.suite import read_suite

ROOT = Path(__file__).resolve().parents[2]


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
        """What it prints, ended with this status."""
        process = self.start(**environment)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == status, output
        return output

    def lines(self, word: str) -> list[str]:
        """What the stand-ins wrote after ``word``."""
        return [line.split(" ", 1)[1] for line in self.log.read_text().splitlines() if line.startswith(word + " ")]

    def cells(self) -> list[Cell]:
        return grid(read_suite(self.suite))

    def written(self) -> dict[str, int]:
        """When each cell was written."""
        return {file.name: file.stat().st_mtime_ns for file in (self.results / "cells").glob("*.json")}

    def change(self, old: str, new: str) -> None:
        text = self.suite.read_text()
        assert old in text
        self.suite.write_text(text.replace(old, new))

    def assert_nothing_is_left(self) -> None:
        """No stand-in runs, and there is no half-written file."""
        deadline = time.monotonic() + 10
        pids = [int(pid) for word in ("server", "client") for pid in self.lines(word)]
        while alive := {p.pid for p in psutil.process_iter(["status"]) if p.info["status"] != "zombie"} & {*pids}:
            assert time.monotonic() < deadline, f"{len(alive)} of {len(pids)} processes were left behind"
            time.sleep(0.1)
        for file in (self.results / "cells").glob("*.json"):
            json.loads(file.read_text())


@pytest.fixture
def trial(small_suite_file: Path) -> Trial:
    return Trial(small_suite_file)


def one_line(output: str) -> str:
    """The error line; there must be exactly one, and no traceback."""
    assert "Traceback" not in output
    errors = [line for line in output.splitlines() if line.startswith("peagle-vllm: ")]
    assert len(errors) == 1, output
    return errors[0]


def test_a_whole_sweep(trial: Trial) -> None:
    output = trial.run()
    results = read_results(trial.results)
    assert Counter(r.cell for r in results) == Counter(trial.cells())
    assert all(r.ok for r in results)
    assert "[8/8] EAGLE-3 K=3, prompts, c=4, repeat 2: " in output and output.count("about 0 min left") == 8
    starts = [line for line in output.splitlines() if line.startswith("starting")]
    order = ["none, repeat 1", "EAGLE-3 K=3, repeat 1", "none, repeat 2", "EAGLE-3 K=3, repeat 2"]
    assert [line.removeprefix("starting ").removesuffix(" ...") for line in starts] == order
    assert all(file.suffix == ".json" for file in (trial.results / "cells").iterdir())
    trial.assert_nothing_is_left()
    configuration = results[0].configuration
    assert configuration["bench"][0] == "python" and str(trial.suite.parent) not in json.dumps(configuration)


def test_killed_twice(trial: Trial) -> None:
    """Servers and clients end with the sweep, even where it cannot end them."""
    trial.change("repeats: 2", "repeats: 4")
    rng = random.Random(0)
    whole: dict[str, int] = {}
    for _ in range(2):
        process = trial.start()
        starts = len(trial.lines("server"))
        deadline = time.monotonic() + 30
        while len(trial.lines("server")) == starts and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)  # imports take as long as the machine is busy; kill a sweep, not an interpreter
        time.sleep(rng.uniform(0, 1.2))
        assert process.poll() is None, "the sweep ended before it was killed: give it more repeats"
        process.kill()
        process.communicate(timeout=60)
        trial.assert_nothing_is_left()
        assert whole.items() <= trial.written().items(), "a cell was measured again, or is gone"
        whole = trial.written()
    trial.run()
    results = read_results(trial.results)
    assert Counter(r.cell for r in results) == Counter(trial.cells())
    assert whole.items() <= trial.written().items()
    measured = Counter(trial.lines("measured"))
    assert sum(measured.values()) <= len(trial.cells()) + 2  # at most the one cell that each kill threw away
    trial.assert_nothing_is_left()


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
    results, log = read_results(trial.results), trial.results / "logs/eagle-3-k3-r1-server.log"
    assert [r.ok for r in results] == is_ok and all(reason in r.reason for r in results if not r.ok)
    assert f"{is_ok.count(False)} of 4 cells failed" in output
    assert ("the server cannot be measured: " in output and f"  its log: {log}\n" in output) == (standin == "no-start")
    assert log.exists() and log.with_stem("eagle-3-k3-r1-server-2").exists() == (standin == "sickens:1")
    trial.assert_nothing_is_left()


def test_a_client_that_fails_and_then_does_not(trial: Trial) -> None:
    trial.change("repeats: 2", "repeats: 1")
    assert "the same command tries them again" in trial.run(1, STANDIN_CLIENT="fails", STANDIN_CLIENT_FOR_EAGLE="half")
    reasons = {r.cell.arm: r.reason for r in read_results(trial.results)}
    assert "FileNotFoundError: no such" in reasons["none"]
    assert "6 of 12 requests were answered: Connect" in reasons["EAGLE-3"]
    trial.run()
    assert all(r.ok for r in read_results(trial.results))


def test_two_sweeps_in_one_folder(trial: Trial) -> None:
    first = trial.start(STANDIN_CLIENT="slow")
    try:
        deadline = time.monotonic() + 20
        while not trial.lines("client") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "another sweep is writing into results" in one_line(trial.run(2))
    finally:
        first.send_signal(signal.SIGINT)
        output, _ = first.communicate(timeout=60)
    assert first.returncode == 130 and "interrupted" in one_line(output)
    trial.assert_nothing_is_left()


def test_results_of_another_suite_or_of_other_versions(trial: Trial) -> None:
    """More repeats are the same suite."""
    trial.change("repeats: 2", "repeats: 1")
    trial.run()
    trial.change("repeats: 1", "repeats: 2")
    trial.change("output_tokens: 64", "output_tokens: 32")
    assert "results of another suite" in one_line(trial.run(2))
    trial.change("output_tokens: 32", "output_tokens: 64")
    prompts = trial.suite.parent / "prompts.jsonl"
    text = prompts.read_text()
    prompts.write_text(2 * text)
    assert "begun with other prompts (prompts " in one_line(trial.run(2))
    prompts.write_text("{")
    assert "prompts.jsonl:1 is not valid JSON; write " in one_line(trial.run(2))
    prompts.write_text(text)
    sweep = json.loads((trial.results / "sweep.json").read_text())
    sweep["versions"]["torch"] = "0.1"
    (trial.results / "sweep.json").write_text(json.dumps(sweep))
    assert "begun with other versions (torch 0.1 -> " in one_line(trial.run(2))
    (trial.results / "sweep.json").write_text("{")
    assert "sweep.json: is no JSON" in one_line(trial.run(2))
