"""The committed heads of the real target draft as they did when they were trained; figures of what is measured."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

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


def test_acceptance_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(real, "KEPT", tmp_path / "kept.jsonl")
    started = Mock(side_effect=lambda *_: {"drafter": "", "sets": started.call_count})
    monkeypatch.setattr(real, "in_own_process", started)
    for _ in range(2):
        assert [real.acceptance(arm) for arm in real.ARMS] == [*range(1, len(real.ARMS) + 1)]
    assert [call.args[1] for call in started.call_args_list] == real.ARMS


def test_one_drafter_is_measured_beside_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["real.py", "--only", "n-gram K=5"])
    real.main()
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["n-gram", "K=5"]]


def test_second_turns_follow_the_kept_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before there are any, an arm's own, which are kept."""
    asked, engine = list[list[list[str]]](), object.__new__(real.Engine)
    output = SimpleNamespace(text="its own", token_ids=[1], spec_decode_metrics=None)
    engine.arm, engine.answer = real.NONE, lambda chats, **_: asked.append(chats) or [output] * len(chats)
    kept = real.first_answers()["mt-bench"]
    assert [cell["first"] for _, cell in engine.acceptance(2)] == [[], []]
    assert [chat[1] for chat in asked[-1]] == [kept[0], kept[40]] and len(kept) == 80
    monkeypatch.setattr(real, "KEPT", tmp_path / "nothing")
    assert [cell["first"] for _, cell in engine.acceptance(2)] == [[], ["its own"] * 2]
    assert [chat[1] for chat in asked[-1]] == ["its own"] * 2


def test_a_head_without_its_selector(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(real, "WORK", tmp_path)
    configs = [arm.speculative_config() for arm in real.ARMS if arm.name.startswith(real.PLAIN)]
    (folder,) = tmp_path.iterdir()
    assert [config["model"] for config in configs] == [str(folder)] * 2
    assert "candidate_selector" not in json.loads((folder / "config.json").read_text())
    assert not list(folder.glob("edge*"))


@pytest.mark.full
def test_heads_are_trained_from_the_committed_text(tmp_path: Path) -> None:
    """`make real-heads` on 24 answers, two steps a head."""
    heads = tmp_path / "heads"
    small = ["--answers", "24", "--steps", "2", "--run", str(tmp_path / "run"), "--out", str(heads)]
    subprocess.run([sys.executable, "models/recipe/real.py", *small], cwd=arms.ROOT, check=True)
    for name in ("peagle", "eagle3"):
        config, record = (json.loads((heads / name / file).read_text()) for file in ("config.json", "training.json"))
        assert ("candidate_selector" in config) == (name == "peagle")
        assert record["drafts"]["output_tokens"] == 256
