"""The planner on the published figures of gpt-oss-20b."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from peagle_tools.cli import app
from peagle_tools.plan import backtest

TABLES = {p.dataset: p for p in backtest.judged()}


def test_there_are_the_three_tables() -> None:
    assert set(TABLES) == {"MT-Bench", "HumanEval", "SPEED-Bench code"}


@pytest.mark.parametrize("dataset", TABLES)
def test_best_depths_are_the_published_ones(dataset: str) -> None:
    """P-EAGLE K=7 at every concurrency; EAGLE-3 K=3, "occasionally shifting toward higher values"."""
    found = backtest.verdicts(TABLES[dataset])
    assert [v.concurrency for v in found] == [1, 2, 4, 8, 16, 32, 64]
    assert all(v.best["P-EAGLE", "free"] == 7 for v in found)
    assert all(v.best["EAGLE-3", "free"] == 3 for v in found if v.concurrency <= 16)
    assert sum(v.best["EAGLE-3", "free"] != 3 for v in found) <= 2


@pytest.mark.parametrize("dataset", TABLES)
def test_the_other_extreme_agrees_about_eagle3(dataset: str) -> None:
    """Whatever verifying costs, EAGLE-3 is best at K=3 at small batches."""
    assert all(v.best["EAGLE-3", "full"] == 3 for v in backtest.verdicts(TABLES[dataset]) if not v.extrapolated)


@pytest.mark.parametrize("dataset", TABLES)
def test_the_choice_does_not_hang_on_the_assumed_draft_cost(dataset: str) -> None:
    limit = backtest.holds_from(TABLES[dataset])
    assert 0 < limit <= backtest.DRAFT_COST["EAGLE-3"] / 2


@pytest.mark.parametrize("dataset", TABLES)
def test_permuted_acceptance_changes_the_answer(dataset: str) -> None:
    figures = TABLES[dataset]
    lengths = figures.acceptance_length

    def best(acceptance) -> tuple[int, int]:
        v = backtest.verdicts(replace(figures, acceptance_length=acceptance))[0]
        return v.best["P-EAGLE", "free"], v.best["EAGLE-3", "free"]

    assert best(lengths) == (7, 3)
    swapped = {kind: {3: table[7], 7: table[3]} for kind, table in lengths.items()}
    assert best(swapped)[0] == 3
    # a head that drafts sequentially and is accepted as often as its depth allows is best deep
    assert best({"P-EAGLE": lengths["P-EAGLE"], "EAGLE-3": {3: 3.9, 7: 7.5}})[1] == 7


def test_the_baseline_is_the_published_column() -> None:
    """294, 889, 1587, 4452, 10943 tokens/s at c = 1, 4, 8, 32, 128."""
    target = backtest.baseline()
    assert target(1) == 1
    assert target(8) == pytest.approx(8 / 1587 * 294)
    assert target(128) == pytest.approx(128 / 10943 * 294)


def test_the_command_says_what_it_assumed() -> None:
    done = CliRunner().invoke(app, ["plan", "--published"])
    assert done.exit_code == 0
    text = " ".join(done.output.split())
    for line in backtest.ASSUMED:
        assert " ".join(line.split()) in text


def test_what_is_claimed_is_what_the_table_shows() -> None:
    """Every sentence below a table, recomputed from the table's own rows."""
    text = " ".join(CliRunner().invoke(app, ["plan", "--published"]).output.split())
    assert "EAGLE-3 is best at K=3 as long as" in text and text.count("At one request EAGLE-3 is best") == len(TABLES)
    for figures in TABLES.values():
        found = backtest.verdicts(figures)
        for kind in backtest.DRAFT_COST:
            for bound in backtest.BOUNDS:
                claim = backtest.chosen(found, kind, bound)
                assert claim in text
                claimed = {}
                for part in claim.split("K=")[1:]:
                    k, where = part.rstrip(", ").split(" at c=")
                    claimed |= {int(c): int(k) for c in where.split(", ")}
                assert claimed == {v.concurrency: v.best[kind, bound] for v in found}
        above = sum(v.ratio["free"] > v.published for v in found)
        assert f"The model's P/E is above the published one at {above} of 7 concurrencies" in text
