"""``peagle-vllm convert --draft-vocab``: which rows of lm_head are kept, and nothing else changes."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from peagle_tools.convert.draft_vocab import choose, needed_ids
from peagle_tools.shared.prompts import read_tokenizer
from peagle_vllm.heads import convert
from peagle_vllm.heads.checks import check_pair
from peagle_vllm.heads.head import read_head, read_map, target_ids
from peagle_vllm.heads.target import read_target
from tests.inspect.test_convert import tensors
from tests.support.command import only_line, run
from tests.support.dialects import edit
from tests.support.models import PEAGLE, TARGET, heldout
from tests.support.random_heads import HeadSpec, write_pair

HEADS = {
    "speculators": HeadSpec(),
    "aws": HeadSpec(fmt="aws"),
    "qwen3": HeadSpec(family="qwen3", norm_before_fc=True),
    "reduced": HeadSpec(draft_vocab=300),
}
TEXTS = heldout()  # more kinds of tokens than are kept


@pytest.mark.parametrize("to", ["vllm", "speculators"])
@pytest.mark.parametrize("name", HEADS)
def test_a_trimmed_head_keeps_its_rows(name: str, to: Any, tmp_path: Path):
    folders = write_pair(tmp_path, HEADS[name])
    target, head = read_target(str(folders[0])), read_head(folders[1])
    ids = target_ids(head)
    kept = np.arange(5, len(ids), 3)
    (tmp_path / "out").mkdir()
    convert.convert(head, tmp_path / "out", to, target, kept=kept)
    trimmed = read_head(tmp_path / "out")
    assert check_pair(trimmed, target) == []
    assert read_map(trimmed).form == "offsets" and target_ids(trimmed).tolist() == ids[kept].tolist()
    before, after = tensors(folders[1]), tensors(tmp_path / "out")
    assert torch.equal(after.pop("lm_head.weight"), before.pop("lm_head.weight")[kept])
    assert after.pop("t2d").nonzero().flatten().tolist() == ids[kept].tolist()
    for tensor in set(before) - {"d2t", "t2d"}:
        assert torch.equal(after[tensor].flatten(), before[tensor].flatten()), tensor


def most_frequent(texts: list[str], tokenizer: Any) -> list[int]:
    """The 27 token ids that the texts hold most, but for those that any text may need."""
    ids = [i for text in texts for i in tokenizer.encode(text, add_special_tokens=False)]
    frequent = np.argsort(-np.bincount(ids, minlength=512), kind="stable")
    return np.setdiff1d(frequent, needed_ids(tokenizer), assume_unique=True)[:27].tolist()


@pytest.mark.parametrize("answered", [True, False])
def test_what_any_text_needs_is_kept_then_what_is_said_most(answered: bool):
    """Answers alone count where there are some."""
    chats = [[{"role": "assistant" if answered else "user", "content": text}] for text in TEXTS]
    if answered:
        chats[0].insert(0, {"role": "user", "content": "import " * 999})
    vocab, tokenizer = choose(read_head(PEAGLE), str(TARGET), 290, chats), read_tokenizer(str(TARGET))
    needed = needed_ids(tokenizer)
    assert vocab.kept.tolist() == sorted(vocab.kept) and len(vocab.kept) == 290
    assert set(needed) < set(vocab.kept) and len(needed) == 256 + 7  # bytes and special tokens
    assert set(vocab.kept) == {*needed, *most_frequent(TEXTS, tokenizer)}
    # Coverage is of texts that chose nothing.
    chosen = {*needed, *most_frequent([text for i, text in enumerate(TEXTS) if i % 10], tokenizer)}
    held = [i for text in TEXTS[::10] for i in tokenizer.encode(text, add_special_tokens=False)]
    assert vocab.coverage == pytest.approx(np.mean([i in chosen for i in held])) and vocab.coverage < 1


def test_the_command_writes_it_and_says_what_it_covers(tmp_path: Path):
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    options = ("--target", TARGET, "--text", file, "--draft-vocab")
    ran = run("convert", PEAGLE, tmp_path / "out", *options, 300)
    assert (ran.exit_code, ran.stderr) == (0, "") and read_head(tmp_path / "out").draft_vocab_size == 300
    assert re.search(r"\n300 of 512 draft tokens: \d+\.\d% of held-out text\n", ran.stdout)
    for wrong, line in (
        (("--draft-vocab", 300, "--target", TARGET), "--draft-vocab N, --text FILE and --target TARGET go together"),
        ((*options, 512), "--draft-vocab is 512, "),
        ((*options, 262), "but 263 special tokens, bytes and digits are kept; give more"),
    ):
        assert line in only_line(run("convert", PEAGLE, tmp_path / "none", *wrong))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("spec", "line"),
    [(HeadSpec(own_lm_head=False), "no lm_head of its own"), (HeadSpec(selector=True), "has a selector")],
)
def test_what_cannot_be_trimmed(spec: HeadSpec, line: str, tmp_path: Path):
    target, head = write_pair(tmp_path, spec)
    (tmp_path / "text").write_text("some text\n")
    options = ("--draft-vocab", 100, "--target", target, "--text", tmp_path / "text")
    assert line in only_line(run("convert", head, tmp_path / "out", *options))


def test_nothing_is_left_of_a_broken_head(tmp_path: Path):
    """Not even where the row that is broken would be left out."""
    target, folder = write_pair(tmp_path)
    for file in TARGET.glob("tokenizer*"):
        (target / file.name).write_bytes(file.read_bytes())
    edit(folder, lambda head: head.tensors["lm_head.weight"][-1, 3].fill_(torch.nan))
    (tmp_path / "text").write_text("some text\n")
    options = ("--draft-vocab", 300, "--target", target, "--text", tmp_path / "text")
    ran = run("convert", folder, tmp_path / "out", *options)
    assert ran.exit_code in (1, 2) and "lm_head.weight holds NaN or Inf" in ran.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "target", "text"]
