"""``--draft-vocab`` and ``--quantize`` from the command line, with stand-ins for what vLLM records and measures."""

import json

import pytest
import torch

from peagle_tools.sharpen import run, vocabulary
from peagle_tools.sharpen.trace import CandidateTrace, Gain
from peagle_vllm.heads.head import read_head, target_ids
from tests.inspect.running import only_line
from tests.inspect.running import run as command
from tests.support import models

SAID = torch.arange(100, 140)  # what the target says: token 100 + i most, where i is low
TOKENS = SAID[torch.arange(40)[:, None].minimum(torch.randint(0, 40, (40, 600), generator=torch.manual_seed(0)))]


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """Nothing is served. What was measured and sharpened is kept."""
    calls = {"recorded": 0, "measured": [], "sharpened": []}

    def recorded(pair, prompts, work, plan, progress):
        calls["recorded"] += 1
        tokens = TOKENS.flatten().view(-1, 4).int()
        candidates = tokens[:, 1:, None].repeat(1, 1, 2)
        prompt = torch.arange(len(tokens)) // 10
        return CandidateTrace(candidates, torch.zeros(candidates.shape), torch.zeros(len(tokens), 3, 1), tokens, prompt)

    def measured(pair, folder, prompts, plan, progress):
        calls["measured"].append((pair.head, read_head(folder)))
        return [run.Comparison(3, Gain(3.0, 0.1), Gain(2.9, 0.1), Gain(-0.1, 0.1), [0.5], [0.5])]

    def sharpen(head, target, vocab_size, prompts, out, plan, progress):
        calls["sharpened"].append(target_ids(head).tolist())
        gain = 0.5 if calls.get("better") else -0.1
        if gain > 0:
            out.mkdir()
        one = run.Comparison(3, Gain(2.9, 0.1), Gain(2.9 + gain, 0.1), Gain(gain, 0.1), [0.5], [0.5])
        return run.Sharpened({}, "gated", 10, {3: (one.before, one.after)}, [one])

    for name, stand_in in (("recorded", recorded), ("served", measured), ("sharpen", sharpen)):
        monkeypatch.setattr(run, name, stand_in)
    return calls


@pytest.fixture
def sharpen(monkeypatch, tmp_path):
    def call(*options, head=models.PEAGLE, num_prompts=200):
        file = tmp_path / "prompts.txt"
        file.write_text("".join(f"prompt {i}\n" for i in range(num_prompts)))
        pair = ("--target", models.TARGET, "--prompts", file)
        return command(monkeypatch, "sharpen", head, tmp_path / "out", *pair, *options)

    return call


def test_a_trimmed_head_without_a_selector(sharpen, served, tmp_path):
    ran = sharpen("--draft-vocab", 40, "--no-selector", "--json")
    specials = vocabulary.special_ids(str(models.TARGET))
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
    assert served["measured"][0][0] == str(models.PEAGLE)


def test_the_edge_is_fitted_to_the_smaller_head(sharpen, served, tmp_path):
    served["better"] = True
    ran = sharpen("--draft-vocab", 40, "--quantize", "int8")
    (ids,) = served["sharpened"]
    assert len(ids) == 40 and ran.code == 0 and list((tmp_path / "out").iterdir()) == []  # what sharpen itself wrote


def test_a_useless_edge_leaves_the_smaller_head(sharpen, served, tmp_path):
    ran = sharpen("--draft-vocab", 40)
    assert ran.code == 0 and read_head(tmp_path / "out").draft_vocab_size == 40
    assert ran.err == "a selector is no better on held-out prompts: the smaller head is written without one\n"


def test_auto_takes_what_pays(sharpen, tmp_path):
    """40 tokens are all that is said, so the fewest that are tried, with the special ones, lose nothing."""
    reduction = json.loads(sharpen("--draft-vocab", "auto", "--no-selector", "--json").out)["reduction"]
    assert (reduction["draft_vocab"], reduction["covered"]) == (64, 1.0)


def test_auto_may_find_nothing_to_leave_out(sharpen, monkeypatch, tmp_path):
    monkeypatch.setattr(vocabulary, "best_size", lambda order, *args: len(order))
    assert "fewer than 512 tokens are not expected to be faster" in only_line(sharpen("--draft-vocab", "auto"))
    assert not (tmp_path / "out").exists()
    assert sharpen("--draft-vocab", "auto", "--quantize", "int8", "--no-selector").code == 0


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--no-selector"], "--no-selector leaves nothing to do"),
        (["--draft-vocab", "many"], "--draft-vocab is many, needs a whole number"),
        (["--draft-vocab", "0"], "--draft-vocab is 0, needs a whole number"),
        (["--draft-vocab", "512"], "--draft-vocab is 512"),
        (["--draft-vocab", "3"], "special tokens are kept always"),
    ],
)
def test_bad_options(sharpen, options, line, served, tmp_path):
    assert line in only_line(sharpen(*options))
    assert served["recorded"] == 0 and not (tmp_path / "out").exists()
