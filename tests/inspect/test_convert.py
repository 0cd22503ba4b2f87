"""``peagle-vllm convert``: every dialect, there and back, whole or not at all; and with fewer draft tokens."""

import errno
import fcntl
import json
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from peagle_tools.convert.draft_vocab import choose, needed_ids
from peagle_tools.shared.atomic_files import new_folder
from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.prompts import read_tokenizer
from peagle_vllm.heads import convert
from peagle_vllm.heads.checks import check_head, check_pair
from peagle_vllm.heads.config import vllm_name
from peagle_vllm.heads.head import read_head, read_map, target_ids
from peagle_vllm.heads.target import read_target
from tests.heads import writers
from tests.heads.judging import fc_norm, meaning, norm_before_fc, top_fc_norm, windowed
from tests.heads.test_fields import sharpened, vllms_config
from tests.heads.writers import AUX, DRAFT_VOCAB, SERVED, VOCAB
from tests.support.command import only_line, run
from tests.support.dialects import edit
from tests.support.models import PEAGLE, PEAGLE_REDUCED, TARGET, heldout
from tests.support.random_heads import HeadSpec, write_pair, write_target


def varied(change, base=writers.speculators):
    head = base()
    change(head)
    return head


CASES = SERVED | {
    "sharded": lambda: varied(lambda head: setattr(head, "shards", 3)),
    "fc_norm": lambda: varied(fc_norm),
    "top_fc_norm": lambda: varied(top_fc_norm),
    "norm_before_fc": lambda: varied(norm_before_fc),
    "windowed": lambda: varied(windowed),
    "prefixed": lambda: varied(lambda h: setattr(h, "tensors", {f"model.{n}": t for n, t in h.tensors.items()})),
    "windowed qwen3": lambda: varied(windowed, lambda: writers.speculators("qwen3")),
    "bfloat16": lambda: varied(lambda h: h.tensors.update({n: t.bfloat16() for n, t in h.tensors.items()})),
    "bare": lambda: varied(lambda h: [h.tensors.pop(n) for n in ("embed_tokens.weight", "lm_head.weight")]),
}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {vllm_name(n): t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


same = partial(torch.testing.assert_close, rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_there_and_back_changes_no_tensor(name: str, tmp_path: Path):
    source = head = CASES[name]().save(tmp_path / "head")
    depth, original = read_head(head).trained_depth, tensors(head)
    if read_head(head).draft_vocab_size == VOCAB:  # the identity map says nothing
        original = {name: tensor for name, tensor in original.items() if name not in ("d2t", "t2d")}
    for step, to in enumerate(("vllm", "speculators", "vllm")):
        out = tmp_path / str(step)
        ran = run("convert", source, out, "--to", to)
        assert ran.exit_code == 0, ran.stderr
        same(tensors(out), original)
        assert meaning(out) == meaning(head)
        assert read_head(out).trained_depth == (depth or (7 if step else None))  # speculators' format has to name one
        assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
        ran = run("inspect", out)
        assert (ran.exit_code, "unfit" in ran.stdout, "warning" in ran.stdout) == (0, False, False), ran.stdout
        source = out
    assert (tmp_path / "0/model.safetensors").read_bytes() == (tmp_path / "2/model.safetensors").read_bytes()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_stock_vllm_finds_everything_in_the_result(name: str, to: str, tmp_path: Path):
    """Nothing is left for serving to map; ``--window`` is that of every layer, whatever windows the head had."""
    head = CASES[name]().save(tmp_path / "head")
    wanted, num_layers = meaning(head), read_head(head).num_layers
    window = {"layer_types": ["sliding_attention"] * num_layers, "sliding_window": 16}
    for out, more, changed in (("plain", (), {}), ("windowed", ("--window", "16"), window)):
        assert run("convert", head, tmp_path / out, "--to", to, *more).exit_code == 0
        read, config, wanted = read_head(tmp_path / out), vllms_config(tmp_path / out), wanted | changed
        assert config.architectures == [read.architecture]
        for field in ("norm_before_residual", "norm_before_fc", "fc_norm"):
            assert bool(getattr(config, field, False)) == wanted[field]
        full = ["full_attention"] * num_layers
        assert (getattr(config, "layer_types", None) or full) == (wanted["layer_types"] or full)
        assert not wanted["layer_types"] or config.sliding_window == wanted["sliding_window"]
        rope = getattr(config, "rope_parameters", None) or {}
        assert rope.get("rope_theta", getattr(config, "rope_theta", None)) == wanted["rope_parameters"]["rope_theta"]
        assert config.num_aux_hidden_states == wanted["num_aux_hidden_states"]
    assert meaning(tmp_path / "windowed") == meaning(tmp_path / "plain") | window
    same(tensors(tmp_path / "plain"), tensors(tmp_path / "windowed"))


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_target_ids_become_offsets(marked: bool, dtype: torch.dtype, tmp_path: Path):
    """And leave the hash that a selector knows its head by; tests/drafts/test_dialects.py has a head without one."""
    head = writers.speculators(draft_vocab=DRAFT_VOCAB)
    offsets, t2d = head.tensors["d2t"].clone(), head.tensors["t2d"].clone()
    head.tensors["d2t"] = (offsets + torch.arange(DRAFT_VOCAB)).to(dtype)
    if not marked:
        del head.tensors["t2d"]
    inspected = json.loads(run("inspect", sharpened(head, tmp_path / "head"), "--json").stdout)
    assert inspected["vocabulary_map"] == "target ids"
    assert "peagle-vllm convert" in inspected["problems"][0]["line"]
    assert run("convert", tmp_path / "head", tmp_path / "out").exit_code == 0
    written = tensors(tmp_path / "out")
    assert torch.equal(written["d2t"], offsets) and torch.equal(written["t2d"], t2d)
    assert check_head(read_head(tmp_path / "out")) == []


def test_the_target_is_written_down(tmp_path: Path):
    target, head = write_target(tmp_path / "target"), writers.aws().save(tmp_path / "head")
    ran = run("convert", head, tmp_path / "out", "--to", "speculators", "--target", target)
    assert (ran.exit_code, ran.stderr) == (0, "")
    read = read_head(tmp_path / "out")
    assert read.aux_layer_ids == tuple(AUX[3])
    assert read.config["speculators_config"]["verifier"]["name_or_path"] == str(target)
    assert check_pair(read, writers.TARGET, num_speculative_tokens=5) == []


def test_nothing_is_overwritten(tmp_path: Path):
    head = writers.aws().save(tmp_path / "head")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    for out in (head, tmp_path / "empty", tmp_path / "dangling", head / "config.json", tmp_path):
        assert "exists; name a folder that does not" in only_line(run("convert", head, out))
    assert "is not a folder; make it first" in only_line(run("convert", head, tmp_path / "a" / "b"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "empty", "head"]


@pytest.mark.parametrize("has_locks", [True, False])  # Lustre has none unless mounted with them
def test_the_quicker_of_two_converts_wins(has_locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    with pytest.raises(ToolError, match="has appeared meanwhile"), new_folder(tmp_path / "out") as slow:
        (slow / "file").write_text("slow")
        with new_folder(tmp_path / "out") as quick:
            assert (slow / "file").exists(), "a living process's work was taken for a leftover"
            (quick / "file").write_text("quick")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "quick"


# `convert`, which begins the file of weights and then waits.
SLOW = """
import sys, time
from peagle_tools.cli import app
from peagle_vllm.heads import convert

def slow(path, tensors):
    path.touch()
    time.sleep(60)

convert._write_safetensors = slow
sys.argv[1:] = ["convert", *sys.argv[1:]]
app()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_convert_leaves_no_half_result(how: signal.Signals, tmp_path: Path):
    head, out = writers.aws().save(tmp_path / "head"), tmp_path / "out"
    # A job in the background starts its children with SIGINT ignored, and they would keep to that.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, "-c", SLOW, str(head), str(out)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=heed)
    limit = time.monotonic() + 60
    while not any(file for part in tmp_path.glob(".*.partial") for file in part.rglob("*.safetensors")):
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.005)
    process.send_signal(how)
    assert process.wait() != 0
    assert not out.exists()
    assert len(list(tmp_path.glob(".*.partial"))) == (how == signal.SIGKILL)
    # The next convert removes what is left, writes, and leaves nothing else.
    assert run("convert", head, out).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "out"]


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


def most_frequent(texts: list[str], tokenizer: Any, ids: np.ndarray) -> list[int]:
    """Those of ``ids`` that the texts hold, most first, but for those that any text may need."""
    held = [i for text in texts for i in tokenizer.encode(text, add_special_tokens=False)]
    frequent = np.argsort(-np.bincount(held, minlength=512), kind="stable")
    return np.setdiff1d(frequent[np.isin(frequent, ids)], needed_ids(tokenizer), assume_unique=True).tolist()


@pytest.mark.parametrize(("answered", "folder", "size"), [(True, PEAGLE, 290), (False, PEAGLE_REDUCED, 100)])
def test_what_any_text_needs_is_kept_then_what_is_said_most(answered: bool, folder: Path, size: int):
    """Answers alone count where there are some."""
    chats = [[{"role": "assistant" if answered else "user", "content": text}] for text in TEXTS]
    if answered:
        chats[0].insert(0, {"role": "user", "content": "import " * 999})
    ids, tokenizer = target_ids(head := read_head(folder)), read_tokenizer(str(TARGET))
    kept, coverage = choose(head, str(TARGET), size, chats)
    assert kept.tolist() == sorted(kept) and len(kept) == size
    assert len(needed_ids(tokenizer)) == 256 + 7  # bytes and special tokens
    needed = {*needed_ids(tokenizer)} & {*ids.tolist()}
    assert {*ids[kept].tolist()} == {*needed, *most_frequent(TEXTS, tokenizer, ids)[: size - len(needed)]}
    # Coverage is of texts that chose nothing.
    others = [text for i, text in enumerate(TEXTS) if i % 10]
    chosen = {*needed, *most_frequent(others, tokenizer, ids)[: size - len(needed)]}
    held = [i for text in TEXTS[::10] for i in tokenizer.encode(text, add_special_tokens=False)]
    assert coverage == pytest.approx(np.mean([i in chosen for i in held])) and coverage < 1


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
