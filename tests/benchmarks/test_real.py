"""The committed head of the real target drafts as when it was made; figures of what is measured with it."""

import json

import pytest

from benchmarks import arms, real
from benchmarks.heldout import measure


def test_drafts_are_those_of_the_record() -> None:
    """Four answers of 64 tokens in float32, of `make real-heads`; the target is of `make real-target`."""
    assert real.TARGET.is_dir(), "make real-target"
    record = json.loads((real.HEADS / "record.json").read_text())
    how = {key: record[key] for key in ("target", "head", "k", "batch", "max_tokens")}
    prompts = [words[0] for words in real.read_set("humaneval")[: record["batch"]]]
    found = arms.run(measure, {}, models=str(arms.ROOT), prompts=prompts, **how)
    assert found["output_tokens"] == record["output_tokens"] == 256
    assert found["acceptance"] == pytest.approx(record["acceptance"])
    assert found["acceptance_length"] > 1.2


def cell(*counts: list[int]) -> dict:
    """A set of as many prompts: in how many drafts 0, 1, 2 tokens were accepted; the last prompt loops."""
    loops = [False] * (len(counts) - 1) + [True]
    return {"counts": [*counts], "tokens": [8] * len(counts), "loops": loops}


def test_acceptance_of_a_set() -> None:
    found = real.summarize(cell([2, 1, 1], [0, 0, 4]), None)
    assert found["al"] == 1 + (1 + 2 + 8) / 8
    assert found["acceptance"] == [6 / 8, 5 / 8]
    assert found["al_of_prompts_that_do_not_loop"] == 1 + 3 / 4
    assert found["al_95"] == [1.75, 3.0]  # both prompts are the one, or the other
    assert real.summarize(cell([0, 0, 0], [0, 0, 0]), None)["al"] == 1


def test_a_gain_is_paired() -> None:
    """Prompts differ far more than the two arms do on each of them."""
    hard, easy = [[8, 1, 1]] * 20, [[1, 1, 8]] * 20
    better = real.summarize(cell(*([7, 2, 1] for _ in hard), *easy), cell(*hard, *easy))
    (low, high), (al_low, al_high) = better["gain_95"], better["al_95"]
    assert 0 < low < better["gain"] < high
    assert high - low < (al_high - al_low) / better["al"] / 4


def test_the_best_arm_is_the_fastest(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Of each drafter, with one request in flight."""

    def row(name: str, k: int, *speeds: float) -> dict:
        sets = {one: {"times_no_speculation": {"1": {"median": x}}} for one, x in zip(real.SETS, speeds, strict=True)}
        return {"arm": {"name": name, "k": k}, "sets": sets}

    rows = [row("none", 0, 1, 1), row("a", 3, 1.2, 1.1), row("a", 5, 1.5, 0.9), row("b", 3, 0.9, 0.8)]
    monkeypatch.setattr(real, "RESULT", tmp_path / "real.json")
    real.RESULT.write_text(json.dumps({"arms": rows}))
    assert [(each["arm"]["name"], each["arm"]["k"]) for each in real.best_arms()] == [("none", 0), ("a", 5), ("b", 3)]
