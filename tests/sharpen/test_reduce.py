"""``--draft-vocab`` and ``--quantize`` from the command line, with stand-ins for what vLLM records and measures."""

import json

import pytest
import torch

from peagle_tools.sharpen import reduce, run
from peagle_tools.sharpen.trace import CandidateTrace, Gain
from peagle_vllm.heads.head import read_head, target_ids
from tests.inspect.running import only_line
from tests.inspect.running import run as command
from tests.support import models

SAID = torch.arange(100, 140)  # what the target says: token 100 + i most, where i is low
TOKENS = SAID[torch.arange(40)[:, None].minimum(torch.randint(0, 40, (40, 600), generator=torch.manual_seed(0)))]


def trace(ids, tokens, prompt):
    """Drafts with these candidates [N, K, M] (draft ids) beside the target's tokens [N, K + 1]."""
    return CandidateTrace(ids.int(), torch.zeros(ids.shape), torch.zeros(*ids.shape[:2], 1), tokens.int(), prompt)


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """Nothing is served. What was measured and sharpened is kept."""
    calls = {"recorded": 0, "measured": [], "sharpened": []}

    def recorded(head, job, work):
        calls["recorded"] += 1
        tokens = TOKENS.flatten().view(-1, 4)
        return trace(tokens[:, 1:, None].repeat(1, 1, 2), tokens, torch.arange(len(tokens)) // 10)

    def measured(head, folder, job):
        calls["measured"].append(head.name)
        return [run.ServedGain(3, Gain(3.0, 0.1), Gain(2.9, 0.1), Gain(-0.1, 0.1))]

    def sharpen(head, job, out):
        calls["sharpened"].append(target_ids(head).tolist())
        gain = 0.5 if calls.get("better") else -0.1
        if gain > 0:
            out.mkdir()
        one = run.ServedGain(3, Gain(2.9, 0.1), Gain(2.9 + gain, 0.1), Gain(gain, 0.1))
        return run.Sharpened({}, "gated", 10, [one])

    for name, stand_in in (("recorded", recorded), ("served", measured), ("sharpen", sharpen)):
        monkeypatch.setattr(run, name, stand_in)
    return calls


@pytest.fixture
def sharpen(monkeypatch, tmp_path):
    def call(*options, num_prompts=200):
        file = tmp_path / "prompts.txt"
        file.write_text("".join(f"prompt {i}\n" for i in range(num_prompts)))
        pair = ("--target", models.TARGET, "--prompts", file)
        return command(monkeypatch, "sharpen", models.PEAGLE, tmp_path / "out", *pair, *options)

    return call


def test_a_trimmed_head_without_a_selector(sharpen, served, tmp_path):
    """It keeps the special tokens, then those that are said most."""
    ran = sharpen("--draft-vocab", 40, "--no-selector", "--json")
    specials = reduce.special_ids(str(models.TARGET))
    ids = target_ids(read_head(tmp_path / "out")).tolist()
    kept = set(ids)
    assert ids == sorted(ids) and len(kept) == 40 and specials < kept
    counts = TOKENS.flatten().bincount(minlength=512)
    others = sorted(kept - specials, key=lambda token: -counts[token])
    assert counts[others].tolist() == counts.sort(descending=True).values[: len(others)].tolist()
    reduction = json.loads(ran.out)["reduction"]
    held, learned = TOKENS.flatten().tensor_split([len(TOKENS.flatten()) // 10])
    best = learned.bincount(minlength=512).argsort(descending=True, stable=True)[: len(others)]
    assert reduction["covered"] == pytest.approx(float(torch.isin(held, best).float().mean()))
    assert reduction["bytes_before"] - reduction["bytes_after"] == (512 - 40) * 128 * 2
    assert ran.code == 0 and served["sharpened"] == [] and [path.name for path in tmp_path.glob(".*")] == []
    assert served["measured"] == [str(models.PEAGLE)]


@pytest.mark.parametrize("better", [True, False])
def test_the_selector_is_fitted_to_the_smaller_head(better, sharpen, served, tmp_path):
    """A useless one leaves the smaller head without it."""
    served["better"] = better
    ran = sharpen("--draft-vocab", 40, "--quantize", "int8")
    (ids,) = served["sharpened"]
    assert len(ids) == 40 and ran.code == 0
    if better:
        assert list((tmp_path / "out").iterdir()) == []  # what sharpen itself wrote
    else:
        assert read_head(tmp_path / "out").draft_vocab_size == 40
        assert ran.err == "a selector is no better on held-out prompts: the smaller head is written without one\n"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--no-selector"], "--no-selector leaves nothing to do"),
        (["--draft-vocab", "512"], "--draft-vocab is 512"),
        (["--draft-vocab", "3"], "special tokens are always kept, and a position has 16 candidates; give at least 16"),
    ],
)
def test_bad_options(sharpen, options, line, served, tmp_path):
    assert line in only_line(sharpen(*options))
    assert served["recorded"] == 0 and not (tmp_path / "out").exists()


def test_too_few_prompts_are_refused_before_anything_is_served(sharpen, served):
    """Where nothing is learned from them, those to measure with suffice."""
    quantized = ("--quantize", "int8", "--no-selector")
    assert "1 prompts to measure with, at least 8 are needed" in only_line(sharpen(*quantized, num_prompts=9))
    assert "36 prompts to learn from, at least 40" in only_line(sharpen("--quantize", "int8", num_prompts=45))
    assert served["measured"] == []
    assert sharpen(*quantized, num_prompts=45).code == 0


def test_each_token_counts_once():
    """An answer 5 6 7 8 9, then its end: the first draft gets one token right, so the next begins at 7."""
    ids = torch.tensor([[[6], [3], [3]], [[8], [9], [3]]])
    seen = trace(ids, torch.tensor([[5, 6, 7, 8], [7, 8, 9, -1]]), torch.arange(2))
    assert reduce.count_tokens(seen, torch.arange(10), 10).tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]


def test_of_equal_counts_the_lower_id_is_kept():
    ids = torch.tensor([1, 2, 3, 4, 5])  # what a reduced head drafts: not token 0
    order = reduce.ranked(torch.tensor([0, 9, 4, 4, 7, 0]), ids, {0, 5})
    assert ids[order].tolist() == [5, 1, 4, 2, 3]
