"""``plan --calibrate``: a short sweep that the planner runs itself, here with stand-ins for server and client."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from peagle_tools.bench.cells import read_results
from peagle_tools.bench.sweep import Sweep
from peagle_tools.cli import app


def test_it_measures_the_smallest_depth_once_and_plans(elsewhere: Path, suite_file: Path) -> None:
    command = ["plan", "--calibrate", str(suite_file), "--k", "3", "--k", "7"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    cells = [r.cell for r in read_results(elsewhere / "bench-results/trial-calibration")]
    assert {(c.arm, c.k) for c in cells} == {("none", 0), ("EAGLE-3", 3), ("P-EAGLE", 3)}
    assert {c.repeat for c in cells} == {1}
    assert "prompts: serve " in done.output and "Break-even concurrency" in done.output
    measured = (elsewhere / "log").read_text().count("measured")
    assert CliRunner().invoke(app, command).exit_code == 0
    assert (elsewhere / "log").read_text().count("measured") == measured  # it goes on with what is there


def test_a_calibration_that_fails_plans_nothing(
    elsewhere: Path,
    suite_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STANDIN", "no-start")
    done = CliRunner().invoke(app, ["plan", "--calibrate", str(suite_file)])
    assert done.exit_code == 2
    assert done.stderr == "peagle-vllm: 6 cells failed; the lines above give the reasons\n"


def test_an_interrupted_calibration_is_one_line(
    elsewhere: Path, suite_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(sweep: Sweep) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(Sweep, "run", interrupted)
    done = CliRunner().invoke(app, ["plan", "--calibrate", str(suite_file)])
    assert (done.exit_code, done.stderr) == (2, "peagle-vllm: interrupted; the same command goes on where it stopped\n")
