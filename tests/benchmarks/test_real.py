"""The committed heads of the real target draft as they did when they were trained; figures of what is measured."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from benchmarks import arms, real


# That of EAGLE-3's head guards stock vLLM's drafter.
@pytest.mark.parametrize("head", ["peagle", pytest.param("eagle3", marks=pytest.mark.full)])
def test_drafts_are_those_of_the_record(head: str) -> None:
    """Those of `make real-heads`; the target is of `make real-target`."""
    assert real.TARGET.is_dir(), "make real-target"
    record = json.loads((real.HEADS / head / "training.json").read_text())["drafts"]
    drafts = real.greedy_drafts(real.HEADS / head)
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
    started: list[real.RealArm] = []

    @contextmanager
    def live(arm: real.RealArm) -> Iterator[Callable[..., dict]]:
        started.append(arm)
        yield lambda *_: {"drafter": len(started)}

    def measured() -> list[dict]:
        return [real.acceptance(arm, {}) for arm in measured_arms]

    monkeypatch.setattr(real, "live", live)
    measured_arms = [arm for arm in real.ARMS if not arm.name.startswith("P")]
    rows = measured()
    assert measured() == rows and started == measured_arms
    monkeypatch.setattr(real, "MAX_TOKENS", {"humaneval": 1})
    assert measured() != rows and started == 2 * measured_arms
    assert len(real.KEPT.read_text().splitlines()) == len(measured_arms)


def test_arms_are_compared_at_the_same_k() -> None:
    """Look-up with the head's own drafts, a selector with the head without it, both with EAGLE-3."""
    compared = {arm.label: [base.label for base in real.compared_with(arm)] for arm in real.ARMS}
    assert compared.pop("P-EAGLE with look-up K=5") == ["P-EAGLE K=5"]
    assert compared.pop("P-EAGLE K=7") == [f"{real.PLAIN} K=7", "EAGLE-3 K=7"]
    assert compared.pop(f"{real.PLAIN} K=7") == ["EAGLE-3 K=7"]
    assert not compared["EAGLE-3 K=7"] and not compared[f"{real.PLAIN}, stock vLLM K=3"]


def test_a_head_without_its_selector(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is written once, for all arms that draft with it."""
    monkeypatch.setattr(real, "WORK", tmp_path)
    configs = [arm.speculative_config() for arm in real.ARMS if arm.name.startswith(real.PLAIN)]
    (folder,) = tmp_path.iterdir()
    assert [config["model"] for config in configs] == [str(folder)] * 3
    assert "candidate_selector" not in json.loads((folder / "config.json").read_text())
    assert not list(folder.glob("edge*"))


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
        assert record["settings"]["head"]["init"] != record["first"]["settings"]["head"]["init"] == "target"
