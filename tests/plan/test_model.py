"""The throughput model: the textbook, the published tables, and fits of cells with known costs."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from peagle_tools.bench import BenchError
from peagle_tools.bench.cells import read_results
from peagle_tools.bench.metrics import points
from peagle_tools.bench.suite import read_suite
from peagle_tools.cli import app
from peagle_tools.plan.advice import Outlook, break_even, choose, schedule, whole_config, why_not
from peagle_tools.plan.fit import fit, judge, non_negative
from peagle_tools.plan.model import ONE_STEP, Costs, Target, speedup
from peagle_tools.plan.profile import Profile, from_alpha, from_lengths, from_shares, parse
from tests.bench import synthetic


def test_the_textbooks_expected_tokens() -> None:
    """n = (1 - alpha^(K+1)) / (1 - alpha); "at alpha = 0.6, K = 4: about 2.3"."""
    for alpha in (0.3, 0.5, 0.7, 0.85):
        for k in range(1, 12):
            assert from_alpha(alpha).length(k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))
    assert from_alpha(0.6).length(4) == pytest.approx(2.3, abs=0.05)
    assert from_alpha(1).length(5) == 6


@pytest.mark.parametrize(("alpha", "k", "published"), [(0.3, 2, 1.2), (0.5, 3, 1.6), (0.7, 4, 2.4)])
def test_the_textbooks_table(alpha: float, k: int, published: float) -> None:
    """Its draft cost is not stated; 5% of a target step gives every "~" of the table within 6%."""
    assert speedup(Costs(ONE_STEP, forward=0.05), from_alpha(alpha), 1, k) == pytest.approx(published, rel=0.06)


def test_parallel_and_sequential_drafts() -> None:
    """One forward against K, all else equal."""
    profile = from_alpha(0.7)
    assert speedup(Costs(ONE_STEP, once=0.1), profile, 1, 7) == pytest.approx(profile.length(7) / 1.1)
    assert speedup(Costs(ONE_STEP, forward=0.1), profile, 1, 7) == pytest.approx(profile.length(7) / 1.7)


def test_profiles() -> None:
    known = from_shares({3: (0.74, 0.56, 0.42), 5: (0.7, 0.5, 0.35, 0.28, 0.26)})
    assert known.shares(3) == (0.74, 0.56, 0.42)
    assert known.shares(2) == (0.74, 0.56)  # cut from the next larger depth
    assert known.shares(4) == (0.7, 0.5, 0.35, 0.28)
    tail = (0.26 / 0.7) ** 0.25
    assert known.shares(7)[5:] == pytest.approx((0.26 * tail, 0.26 * tail**2))
    assert known.deepest == 5


def test_lengths_give_themselves_back() -> None:
    for lengths in ({3: 2.65, 7: 3.03}, {3: 2.87, 7: 3.70}, {5: 2.9}):
        profile = from_lengths(lengths)
        for k, value in lengths.items():
            assert profile.length(k) == pytest.approx(value)
    between = from_lengths({3: 2.65, 7: 3.03})
    assert 2.65 < between.length(5) < 3.03
    assert all(b < a for a, b in zip(between.shares(7), between.shares(7)[1:], strict=False))


@pytest.mark.parametrize(
    "text", ["", "alpha=2", "0.5,0.7", "al:3=9", "al:x=2", "alpha=x", "1.5", "al:"], ids=lambda text: text or "empty"
)
def test_profiles_that_cannot_be(text: str) -> None:
    with pytest.raises(BenchError):
        parse(text)
    done = CliRunner().invoke(app, ["plan", "--what-if", text, "--draft-cost", "0.1"])
    assert done.exit_code == 2 and done.stderr.count("\n") == 1


def test_target_steps_between_and_beyond_points() -> None:
    target = Target(((1, 4.0), (4, 5.5), (8, 6.5)))
    assert [target(b) for b in (1, 2.5, 4, 6, 8, 16)] == pytest.approx([4, 4.75, 5.5, 6, 6.5, 8.5])


# -------------------------------------------------------------------------------------- fits


@pytest.fixture
def measured(tmp_path: Path, suite_file: Path):
    folder = synthetic.write(tmp_path / "r", read_suite(suite_file), spread=0.002)
    return folder, points(read_results(folder))


@pytest.mark.parametrize("arm", ["P-EAGLE", "EAGLE-3"])
def test_costs_come_back_out_of_cells(measured, arm: str) -> None:
    _, found = measured
    fitted = fit(found, arm, "prompts")
    once, forward = (3.0, 0.0) if arm == "P-EAGLE" else (2.0, 1.0)
    assert fitted.costs.once == pytest.approx(once, abs=0.2)
    assert fitted.costs.forward == pytest.approx(forward, abs=0.05)
    assert fitted.assumed == ""
    assert fitted.costs.per_token == pytest.approx(0.05, abs=0.01)
    assert fitted.costs.target(1) == pytest.approx(4.2, rel=0.01)


@pytest.mark.parametrize("arm", ["P-EAGLE", "EAGLE-3"])
def test_k3_predicts_k7(measured, arm: str) -> None:
    _, found = measured
    fitted = fit(found, arm, "prompts", [3])
    predicted = [j for j in judge(fitted, found) if not j.used]
    assert [(j.point.k, j.point.concurrency) for j in predicted] == [(7, 1), (7, 4)]
    assert all(abs(j.error) < 0.03 for j in predicted)
    assert fitted.assumed == ("" if arm == "P-EAGLE" else fitted.assumed)


def test_one_depth_cannot_tell_a_sequential_forward(measured) -> None:
    """With layers known, a forward is taken to cost its share of them; without, all is taken to grow with K."""
    _, found = measured
    known = fit(found, "EAGLE-3", "prompts", [3])
    assert known.costs.forward == pytest.approx(4.2 / 4, rel=0.02) and "its share of layers" in known.assumed
    unknown = fit([replace(p, layers_share=None) for p in found], "EAGLE-3", "prompts", [3])
    assert unknown.costs.once == 0 and "layers unknown" in unknown.assumed
    slow = [j.predicted for j in judge(unknown, found) if j.point.k == 7]
    assert all(a < b for a, b in zip(slow, [j.predicted for j in judge(known, found) if j.point.k == 7], strict=True))


def test_least_squares_without_negative_coefficients() -> None:
    ones, xs = [1.0] * 4, [1.0, 2.0, 3.0, 4.0]
    assert non_negative([ones, xs], [5, 7, 9, 11], ones) == pytest.approx((3, 2))
    assert non_negative([ones, xs], [4, 3, 2, 1], ones) == pytest.approx((2.5, 0))  # the slope would be negative
    assert non_negative([ones, xs], [-4, -3, -2, -1], ones) == (0, 0)
    assert sorted(non_negative([xs, xs], [2, 4, 6, 8], ones)) == pytest.approx([0, 2])  # columns that depend
    assert non_negative([ones], [1, 1, 1, 9], [1, 1, 1, 0]) == pytest.approx((1,))


def test_a_fit_says_what_it_lacks(measured) -> None:
    _, found = measured
    with pytest.raises(BenchError, match="P-EAGLE has no cells at K=5"):
        fit(found, "P-EAGLE", "prompts", [5])
    with pytest.raises(BenchError, match="no cells without speculation"):
        fit([p for p in found if p.kind != "none"], "P-EAGLE", "prompts")


def test_the_command_plans_and_draws(measured) -> None:
    folder, _ = measured
    done = CliRunner().invoke(app, ["plan", str(folder), "--fit-k", "3", "--max-num-seqs", "256"])
    assert done.exit_code == 0, done.output
    assert "Largest error of a predicted cell" in done.output
    assert "--speculative-config" in done.output
    assert "Break-even surface" in (folder / "plan.html").read_text()
    done = CliRunner().invoke(app, ["plan", str(folder), "--arm", "DFlash"])
    assert done.exit_code == 2 and "arms with cells: none, EAGLE-3, P-EAGLE" in done.stderr


# -------------------------------------------------------------------------------------- advice

COSTS = Costs(Target(((1, 4.0), (64, 10.3))), once=1.0, per_token=0.1)


def test_break_even_is_where_nothing_gains() -> None:
    profile, depths = from_alpha(0.6), (1, 3, 7)
    outlook = Outlook(COSTS, profile, depths)
    found = break_even(outlook, 512)
    assert found is not None and found > 1
    assert choose(outlook, found).k == 0
    assert choose(outlook, found - 1).k > 0
    assert break_even(outlook, found - 1) is None
    assert all(speedup(COSTS, profile, found, k) <= 1 for k in depths)


def test_the_schedule_is_vllms() -> None:
    """vLLM's own validator takes it, and looks up in it what the planner chose."""
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    outlook = Outlook(COSTS, from_alpha(0.6), (1, 3, 7))
    ranges = schedule(outlook, 300)
    assert len({k for _, _, k in ranges}) > 2, "a schedule with one depth shows nothing"
    lookup = build_dynamic_sd_schedule_lookup([list(entry) for entry in ranges], 300, 7)
    for requests in range(1, 301):
        assert lookup[requests] == choose(outlook, requests).k


def test_when_not_to_speculate() -> None:
    def why(costs: Costs, alpha: float, requests: int, error: float = 0.0) -> str:
        return why_not(Outlook(costs, from_alpha(alpha), (3, 7), error), requests)

    assert why(COSTS, 0.7, 1) == ""
    assert "acceptance is low" in why(COSTS, 0.05, 1)
    assert "the batch is large" in why(COSTS, 0.5, 512)
    assert "within the error of 60%" in why(COSTS, 0.7, 1, error=0.6)
    tiny = Costs(Target(((1, 0.5),)), forward=1.0)
    assert "the target is small" in why(tiny, 0.6, 1)


def test_between_depths_that_the_error_does_not_tell_apart_the_cheapest_wins() -> None:
    gains = {k: speedup(COSTS, from_alpha(0.7), 1, k) for k in (3, 7)}
    apart = 1 - gains[3] / gains[7]
    assert 0 < apart < 0.2
    fine, coarse = (Outlook(COSTS, from_alpha(0.7), (3, 7), apart * factor) for factor in (0.9, 1.1))
    assert (choose(fine, 1).k, choose(fine, 1).close) == (7, ())
    assert (choose(coarse, 1).k, choose(coarse, 1).close) == (3, (7,))


def test_the_config_holds_all_that_the_arm_is() -> None:
    arm = {"speculative_config": {"method": "eagle3", "model": "m"}, "overrides": {"3": {"a": 1}, "7": {"a": 2}}}
    assert whole_config(arm, [(1, 4, 7), (5, 8, 3)]) == {
        **{"method": "eagle3", "model": "m", "a": 2, "num_speculative_tokens": 7},
        "num_speculative_tokens_per_batch_size": [[1, 4, 7], [5, 8, 3]],
    }
    assert "num_speculative_tokens_per_batch_size" not in whole_config(arm, [(1, 8, 7)])
    assert whole_config(arm, [(1, 64, 0)]) == {}


def test_permuted_acceptance_changes_the_answer() -> None:
    """The order of positions matters: late acceptance is worth nothing to a shallow draft."""
    conditional = (0.9, 0.8, 0.7, 0.3, 0.2, 0.1, 0.1)

    def profile(rates) -> Profile:
        return from_shares({7: [math.prod(rates[: i + 1]) for i in range(7)]})

    costs = Costs(Target(((1, 4.0),)), forward=0.5)
    forwards = choose(Outlook(costs, profile(conditional), range(1, 8)), 1)
    backwards = choose(Outlook(costs, profile(conditional[::-1]), range(1, 8)), 1)
    assert (forwards.k, backwards.k) == (3, 0)
