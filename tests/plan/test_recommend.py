"""What ``plan`` recommends, against faults planted in the cells: it may not promise what was not measured."""

import json
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from typer.testing import CliRunner

from peagle_tools.bench.cells import read_results
from peagle_tools.bench.metrics import points
from peagle_tools.bench.suite import Suite, read_suite
from peagle_tools.cli import app
from peagle_tools.plan.advice import choose
from peagle_tools.plan.fit import ASSUMED_ERROR, fit, judge, outlook
from tests.bench import synthetic


@pytest.fixture
def suite(suite_file: Path) -> Suite:
    return read_suite(suite_file)


def plan(folder: Path, *words: str) -> str:
    done = CliRunner().invoke(app, ["plan", str(folder), *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def answer(folder: Path, *words: str) -> dict:
    """The one recommendation of ``--json``."""
    found = json.loads(plan(folder, "--json", *words))
    (one,) = found.pop("recommendations")
    return one | found


def best(one: dict, c: int) -> tuple[str, int]:
    return next((row["arm"], row["choice"]["k"]) for row in one["rows"] if row["choice"]["requests"] == c)


def test_the_config_is_whole(tmp_path: Path, suite: Suite) -> None:
    """Method, model, K and schedule, on the terminal, as JSON and in plan.html; vLLM accepts the schedule."""
    from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule

    # at c=4 nothing but K=3 gains
    slower = {("P-EAGLE", 7, 4): 2.0, ("EAGLE-3", 3, 4): 2.0, ("EAGLE-3", 7, 4): 2.0}
    folder = synthetic.write(tmp_path / "r", suite, spread=0.001, slower=slower)
    one = answer(folder)
    config = one["config"]
    assert config.pop("num_speculative_tokens_per_batch_size") == one["schedule"] == [[1, 1, 7], [2, 4, 3]]
    validate_and_normalize_dynamic_sd_schedule(one["schedule"])
    assert config == {
        "method": "eagle3",
        "model": "./peagle",
        "parallel_drafting": True,
        "num_speculative_tokens": 7,
    }
    printed = [line for line in plan(folder).splitlines() if line.startswith("{")]
    assert [json.loads(line) for line in printed] == [answer(folder)["config"]]
    assert printed[0] in unescape((folder / "plan.html").read_text())


def test_environment_belongs_to_the_config(tmp_path: Path, suite: Suite) -> None:
    arm = suite.arms["P-EAGLE"].model_copy(update={"environment": {"PEAGLE_VLLM_DISABLE": "1"}})
    folder = synthetic.write(tmp_path / "r", suite.model_copy(update={"arms": suite.arms | {"P-EAGLE": arm}}))
    assert answer(folder)["environment"] == {"PEAGLE_VLLM_DISABLE": "1"}
    assert "With PEAGLE_VLLM_DISABLE=1 set." in plan(folder)


def test_measured_cells_win_over_the_fit(tmp_path: Path, suite: Suite) -> None:
    """One cell is far below what the fit through the others says: the cell counts."""
    slower = {("P-EAGLE", 7, 4): 1.6}
    folder = synthetic.write(tmp_path / "r", suite, spread=0.001, slower=slower)
    found = points(read_results(folder))
    fitted = fit(found, "P-EAGLE", "prompts", [3])
    judged = judge(fitted, found)
    exact = replace(outlook(fitted, judged, (3, 7), None), error=0.0)
    for j in judged:
        measured = j.point.tokens_per_second.median
        assert exact.rate(j.point.concurrency, j.point.k) == pytest.approx(measured)
    assert choose(replace(exact, corrections={}), 4).k == 7, "the fit alone is fooled"
    assert choose(exact, 4).k == 3 and choose(exact, 4).measured
    assert not choose(exact, 3).measured


def test_nothing_is_scheduled_beyond_what_was_measured(tmp_path: Path, suite: Suite) -> None:
    folder = synthetic.write(tmp_path / "r", suite)
    assert answer(folder)["schedule"][-1][1] == answer(folder)["known_to"] == 4
    text = plan(folder)
    assert "extrapolated" not in text and "Beyond c=4 nothing was measured; vLLM goes on there with the last K" in text
    assert answer(folder, "--max-num-seqs", "64")["schedule"][-1][1] == 64
    asked = plan(folder, "--max-num-seqs", "64")
    assert "Beyond c=4 nothing was measured: what follows for it is extrapolated" in asked


def test_one_concurrency_is_refused(tmp_path: Path, suite: Suite) -> None:
    one = suite.model_copy(update={"concurrency": [4]})
    done = CliRunner().invoke(app, ["plan", str(synthetic.write(tmp_path / "r", one))])
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert "no speculation has cells at c=4 only, and one concurrency does not show" in done.stderr


def test_what_is_within_the_error_is_not_promised(tmp_path: Path, suite: Suite) -> None:
    """Cells that scatter by more than the depths differ: the smaller depth, and a line that says why."""
    fine = synthetic.write(tmp_path / "fine", suite, spread=0.001)
    coarse = synthetic.write(tmp_path / "coarse", suite, spread=0.2, seed=5)
    assert answer(fine)["error"] < 0.03 < answer(coarse)["error"]
    assert best(answer(fine), 1) == ("P-EAGLE", 7)
    text = plan(coarse, "--arm", "P-EAGLE")
    assert f"Depths within {answer(coarse, '--arm', 'P-EAGLE')['error']:.0%}, the error, count as equal" in text
    assert answer(coarse, "--arm", "P-EAGLE")["schedule"][0][2] < 7


def test_cells_too_few_for_an_error_get_an_assumed_one(tmp_path: Path, suite: Suite) -> None:
    found = points(read_results(synthetic.write(tmp_path / "r", suite, spread=0)))
    few = [p for p in found if p.k in (0, 3)]
    fitted = fit(few, "P-EAGLE", "prompts")
    assert outlook(fitted, judge(fitted, few), (3,), None).error == ASSUMED_ERROR


@pytest.mark.parametrize("arm", ["P-EAGLE", "EAGLE-3"])
def test_the_best_of_all_arms_is_named(tmp_path: Path, suite: Suite, arm: str) -> None:
    slower = {(other, k, c): 2.0 for other in {"P-EAGLE", "EAGLE-3"} - {arm} for k in (3, 7) for c in (1, 4)}
    folder = synthetic.write(tmp_path / "r", suite, spread=0.001, slower=slower)
    one = answer(folder)
    assert (one["arm"], one["equal"], best(one, 1)[0], best(one, 4)[0]) == (arm, [], arm, arm)
    assert f"prompts: serve {arm}, the best over all arms" in plan(folder)


def test_arms_that_the_error_does_not_tell_apart(tmp_path: Path, suite: Suite) -> None:
    """Two arms of the same head."""
    twin = suite.model_copy(update={"arms": suite.arms | {"P-EAGLE again": suite.arms["P-EAGLE"]}})
    folder = synthetic.write(tmp_path / "r", twin, spread=0.001)
    one = answer(folder)
    assert {one["arm"], *one["equal"]} == {"P-EAGLE", "P-EAGLE again"}
    assert "Its lead over P-EAGLE" in plan(folder)


def test_speculation_that_never_pays_has_no_config(tmp_path: Path, suite: Suite) -> None:
    slower = {(arm, k, c): 5.0 for arm in ("P-EAGLE", "EAGLE-3") for k in (3, 7) for c in (1, 4)}
    folder = synthetic.write(tmp_path / "r", suite, slower=slower)
    assert answer(folder)["config"] == {}
    assert "leave --speculative-config out" in plan(folder)


def test_what_is_hypothetical_says_so(tmp_path: Path, suite: Suite) -> None:
    folder = synthetic.write(tmp_path / "r", suite)
    line = "Hypothetical: acceptance is the one given with --what-if"
    assert line not in plan(folder) and not answer(folder)["hypothetical"]
    text = plan(folder, "--what-if", "alpha=0.9")
    assert line in text and ", measured." not in text
    assert line in (folder / "plan.html").read_text()
    assert answer(folder, "--what-if", "alpha=0.9")["hypothetical"]
    done = CliRunner().invoke(app, ["plan", "--what-if", "alpha=0.7", "--draft-cost", "0.1"])
    assert done.stdout.startswith("Hypothetical: nothing here was measured.")


def test_json_without_results_and_results_without_models_are_refused(tmp_path: Path, suite: Suite) -> None:
    done = CliRunner().invoke(app, ["plan", "--published", "--json"])
    assert (done.exit_code, done.stderr.count("\n"), done.stdout) == (2, 1, "")
    folder = synthetic.write(tmp_path / "r", suite)
    (folder / "sweep.json").unlink()
    done = CliRunner().invoke(app, ["plan", str(folder), "--json"])
    assert done.exit_code == 2 and "sweep.json does not name the model of P-EAGLE" in done.stderr
