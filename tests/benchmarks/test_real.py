"""The committed heads of the real target draft as they did when they were trained; figures of what is measured."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from benchmarks import arms, real


@pytest.mark.parametrize(
    "head", sorted(file.parent for file in real.HEADS.glob("*/training.json")), ids=lambda head: head.name
)
def test_drafts_are_those_of_the_record(head: Path) -> None:
    """Those of `make real-heads`; the target is of `make real-target`."""
    assert real.TARGET.is_dir(), "make real-target"
    record = json.loads((head / "training.json").read_text())["drafts"]
    drafts = real.greedy_drafts(head)
    assert drafts["output_tokens"] == record["output_tokens"] == 256
    assert drafts["acceptance"] == pytest.approx(record["acceptance"])
    assert drafts["acceptance_length"] > 1.2


def cell(*counts: list[int]) -> dict:
    """A set of as many prompts: in how many drafts 0, 1, 2 tokens were accepted; the last prompt loops."""
    loops = [False] * (len(counts) - 1) + [True]
    return {"counts": [*counts], "tokens": [8] * len(counts), "loops": loops}


def test_acceptance_of_a_set() -> None:
    figures = real.summarize(cell([2, 1, 1], [0, 0, 4]))
    assert figures["al"] == 1 + (1 + 2 + 8) / 8
    assert figures["al_of_prompts_that_do_not_loop"] == 1 + 3 / 4
    assert figures["al_95"] == [1.75, 3.0]  # either prompt twice
    assert real.summarize(cell([0, 0, 0], [0, 0, 0]))["al"] == 1


def test_a_gain_is_paired() -> None:
    """Prompts differ far more than the two arms do on each of them."""
    hard, easy = [[8, 1, 1]] * 20, [[1, 1, 8]] * 20
    mine, other = np.array([[7, 2, 1]] * 20 + easy), np.array(hard + easy)
    better, alone = real.gain_of(mine, other), real.al_of(mine)
    (low, high), (al_low, al_high) = better["gain_95"], alone["al_95"]
    assert 0 < low < better["gain"] < high
    assert high - low < (al_high - al_low) / alone["al"] / 4


def test_acceptance_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Until a setting changes; then the new row is in place of the old one, and other arms' stay."""
    monkeypatch.setattr(real, "KEPT", tmp_path / "kept.jsonl")
    asked, arms_of = [], [real.NONE, real.RealArm("n-gram", f"{tmp_path}/ngram", 5)]

    def call(method: str, *_: object) -> int:
        asked.append(method)
        return len(asked)

    def measured() -> list[dict]:
        return [real.acceptance(arm, call, {}) for arm in arms_of]

    rows = measured()
    assert measured() == rows and asked == ["__getattribute__", "acceptance"] * 2
    assert str(tmp_path) not in real.KEPT.read_text()
    monkeypatch.setattr(real, "MAX_TOKENS", {"humaneval": 1})
    assert measured() != rows and len(asked) == 8 and len(real.KEPT.read_text().splitlines()) == 2


def test_arms_are_compared_at_the_same_k() -> None:
    """Look-up with the head's own drafts, a selector with the head without it, both with EAGLE-3."""
    compared = {arm.label: [base.label for base in real.compared_with(arm)] for arm in real.DRAFTERS}
    assert compared.pop("P-EAGLE with look-up K=5") == ["P-EAGLE K=5"]
    assert compared.pop("P-EAGLE K=7") == [f"{real.PLAIN} K=7", "EAGLE-3 K=7"]
    assert compared.pop(f"{real.PLAIN} K=7") == ["EAGLE-3 K=7"]
    assert not compared["EAGLE-3 K=7"] and not compared[f"{real.PLAIN}, stock vLLM K=3"]


def test_a_selector_is_off_before_an_engine_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Arms that share a head without its selector start side by side: their processes find it written."""
    written: list[list[Path]] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, *_: object, **__: object) -> None:
            super().__init__(1)
            written.append(list(real.WORK.glob("*/config.json")))

    monkeypatch.setattr(real, "WORK", tmp_path / "work")
    monkeypatch.setattr(real, "ProcessPoolExecutor", Pool)
    off = [arm for arm in real.DRAFTERS if arm.name.startswith(real.PLAIN)]
    assert [arm.stock for arm in off] == [True, False, False]
    for arm in off:
        with real.live(arm):
            pass
    assert written[0] == written[1] == written[2] and len(written[0]) == 1
    config = json.loads(written[0][0].read_text())
    assert "candidate_selector" not in config and not list(written[0][0].parent.glob("edge*"))


def test_the_best_arm_is_the_fastest(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Of each drafter, with one request in flight."""

    def row(name: str, k: int, *speeds: float) -> dict:
        speed_of = zip(real.SETS, speeds, strict=True)
        sets = {prompts: {"times_no_speculation": {"1": {"median": speed}}} for prompts, speed in speed_of}
        return {"arm": {"name": name, "k": k}, "sets": sets}

    rows = [row("none", 0, 1, 1), row("a", 3, 1.2, 1.1), row("a", 5, 1.5, 0.9), row("b", 3, 0.9, 0.8)]
    monkeypatch.setattr(real, "RESULT", tmp_path / "real.json")
    real.RESULT.write_text(json.dumps({"arms": rows}))
    assert [(best["arm"]["name"], best["arm"]["k"]) for best in real.best_arms()] == [("none", 0), ("a", 5), ("b", 3)]


@pytest.mark.full
def test_heads_are_trained_from_the_committed_text(tmp_path: Path) -> None:
    """`make real-heads` on 24 answers a run, two steps a head."""
    small = ["--answers", "24", "--steps", "2", "--run", f"{tmp_path}/run", "--out", f"{tmp_path}/heads"]
    subprocess.run([sys.executable, "models/recipe/real.py", *small], cwd=arms.ROOT, check=True)
    for head in ("peagle", "eagle3"):
        config = json.loads((tmp_path / "heads" / head / "config.json").read_text())
        assert ("candidate_selector" in config) == (head == "peagle")
        record = json.loads((tmp_path / "heads" / head / "training.json").read_text())
        assert record["drafts"]["output_tokens"] == 256
        assert record["settings"][0]["init"] != record["first"]["settings"][0]["init"] == "target"
