"""The heads of models/ fit their targets."""

import json
from pathlib import Path

import pytest

from peagle_vllm.heads.checks import check_pair
from peagle_vllm.heads.head import read_head
from peagle_vllm.heads.target import Target

MODELS = Path(__file__).resolve().parents[2] / "models"
PEAGLE = sorted(path for path in MODELS.glob("*peagle*") if path.is_dir())
EAGLE3 = sorted(path for path in MODELS.glob("*eagle3*") if path.is_dir())


def target_of(head: Path) -> Target:
    folder = MODELS / "-".join(head.name.split("-")[:2])
    config = json.loads((folder / "config.json").read_text())
    return Target(str(folder), config["hidden_size"], config["vocab_size"], config["num_hidden_layers"])


def test_there_are_heads():
    assert {path.name for path in PEAGLE} >= {"tiny-llama-peagle", "tiny-llama-peagle-d2t", "tiny-qwen3-peagle"}
    assert {path.name for path in EAGLE3} >= {"tiny-llama-eagle3"}


@pytest.mark.parametrize("path", PEAGLE, ids=lambda path: path.name)
def test_peagle_heads_have_no_problem(path: Path):
    head = read_head(path)
    assert (head.dialect, head.trained_depth) == ("speculators", 8)
    for k in (1, 3, 5, 7, 8):
        assert check_pair(head, target_of(path), num_speculative_tokens=k) == []
    (warning,) = check_pair(head, target_of(path), num_speculative_tokens=9)
    assert warning.severity == "warning" and "was trained 8 deep" in warning.line


@pytest.mark.parametrize("path", EAGLE3, ids=lambda path: path.name)
def test_eagle3_heads_are_not_taken_for_peagle(path: Path):
    head = read_head(path)
    (refused,) = check_pair(head, target_of(path), num_speculative_tokens=5)
    assert "is no P-EAGLE head" in refused.line


def test_a_head_for_another_target_is_refused():
    heads = {path.name: path for path in PEAGLE}
    target = target_of(MODELS / "tiny-qwen3-peagle")
    found = check_pair(read_head(heads["tiny-llama-peagle"]), target, num_speculative_tokens=5)
    assert "hidden_size is 128" in found[0].line
