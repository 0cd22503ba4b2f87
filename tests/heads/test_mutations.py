"""Every mutated head is refused by one line that names the fault, or is exactly what it was; and nothing else happens.

Through the commands, as a user would: inspect says it, convert refuses or writes the same weights.
"""

import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from peagle_vllm.heads.config import vllm_name
from peagle_vllm.heads.head import read_head
from tests.heads import writers
from tests.heads.judging import meaning, put
from tests.heads.writers import DRAFT_VOCAB, MASK_TOKEN, Written
from tests.support.command import Result, run
from tests.support.random_heads import write_target

BAD_VALUE = "\ud800\n"  # of any field


class Mutation(NamedTuple):
    name: str  # for the test's report
    words: tuple[str, ...]  # of which the refusing line must hold one
    change: Callable[[Written], object] = lambda head: None  # edits the head before it is written
    damage: Callable[[Path], object] = lambda folder: None  # edits the written folder


def mutations(head: Written) -> Iterator[Mutation]:
    """Every mutation of ``head``, which is not changed: of its config's fields, its tensors and its files."""
    for key, old in head.config.items():  # the fields at the top; tests/drafts/test_config_fields.py has more values
        words = (key, *old) if isinstance(old, dict) else (key,)
        yield Mutation(f"{key} = {BAD_VALUE!r}", words, lambda head, key=key: head.config.update({key: BAD_VALUE}))
    yield from _of_tensors(head)
    for file, (label, how) in itertools.product(("config.json", "model.safetensors"), _FILE_DAMAGES.items()):
        words = (file, "*.safetensors")
        yield Mutation(f"{file} {label}", words, damage=lambda f, file=file, how=how: how(f / file))


def _of_tensors(head: Written) -> Iterator[Mutation]:
    names = sorted(head.tensors)
    for name in names:
        words = (vllm_name(name).removesuffix(".weight"), name, *(("layers",) if "layer" in name else ()))
        full = head.config["draft_vocab_size"] == head.layer_config["vocab_size"]
        if not (words[0] == "embed_tokens" or (words[0] == "lm_head" and full)):  # then the target's is taken
            yield Mutation(f"{name} dropped", words, lambda head, name=name: head.tensors.pop(name))
        yield Mutation(f"{name} renamed", (*words, "x"), partial(_move, name=name, to=f"x.{name}"))
        yield from (Mutation(f"{name} {label}", words, put(name, make)) for label, make in _TENSOR_EDITS.items())
        other = names[(names.index(name) + 1) % len(names)]
        if head.tensors[other].shape != head.tensors[name].shape:
            last = vllm_name(other).rsplit(".", 1)[0]
            yield Mutation(f"{name} and {other} swapped", (*words, last), partial(_swap, name=name, other=other))


def _fill_last(tensor: torch.Tensor, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    if tensor.is_floating_point():
        tensor.view(-1)[-1] = value
    return tensor


_TENSOR_EDITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one row longer": lambda tensor: torch.cat([tensor, tensor[:1]]),
    "one row shorter": lambda tensor: tensor[:-1].contiguous(),
    "empty": lambda tensor: tensor[:0].contiguous(),
    "one number": lambda tensor: tensor.reshape(-1)[0].clone(),
    "with another dimension": lambda tensor: tensor[..., None].contiguous(),
    "of whole numbers": lambda tensor: tensor.to(torch.int32) if tensor.is_floating_point() else tensor.float(),
    "of flags": lambda tensor: tensor.bool(),
    "of fp8": lambda tensor: tensor.float().to(torch.float8_e4m3fn),
    "with NaN": partial(_fill_last, value=float("nan")),
    "with -Inf": partial(_fill_last, value=float("-inf")),
    "in double precision": lambda tensor: tensor.double() if tensor.is_floating_point() else tensor,
}


def _move(head: Written, name: str, to: str) -> None:
    head.tensors[to] = head.tensors.pop(name)


def _swap(head: Written, name: str, other: str) -> None:
    head.tensors[name], head.tensors[other] = head.tensors[other], head.tensors[name]


def _link(path: Path, to: str | Path) -> None:
    path.unlink()
    path.symlink_to(to)


_FILE_DAMAGES: dict[str, Callable[[Path], object]] = {
    "deleted": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "of noise": lambda path: path.write_bytes(bytes(range(256)) * 8),
    "without end": partial(_link, to="/dev/zero"),
    "a link to itself": lambda path: _link(path, path.name),
    "a link out of the folder": lambda path: path.symlink_to(path.rename(path.parent.parent / f"outside-{path.name}")),
    "a link to another file": partial(_link, to="/etc/passwd"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a list": lambda path: path.write_text("[1]"),
    "nested deep": lambda path: path.write_text("[" * 100_000),
    "too large": partial(os.truncate, length=200 << 20),
    "cut short": partial(os.truncate, length=400),
    "of another header": lambda path: path.write_bytes((2**40).to_bytes(8, "little") + path.read_bytes()[8:]),
}


HEADS: dict[str, Callable[[], Written]] = {
    "speculators": lambda: writers.speculators(draft_vocab=DRAFT_VOCAB),
    "aws": writers.aws,
    "flat": writers.flat,
    "nemo-qwen3": lambda: writers.nemo("qwen3"),
    "specforge": lambda: writers.specforge(mask_token_id=MASK_TOKEN),
    "vllm": writers.vllm,
}
STEP = 7  # of the small run: every seventh mutation


def judge(head: Written, mutation: Mutation, place: Path, original: Path, target: Path) -> str:
    """ "refused" or "the same"; anything else is an AssertionError."""
    mutation.change(head)
    folder = head.save(place / "head")
    mutation.damage(folder)
    before = listing(place)

    inspected = run("inspect", "--json", folder, "--target", target)
    converted = run("convert", folder, place / "out", "--target", target)
    lines = refusals(inspected)
    if lines:
        assert converted.exit_code != 0 and not (place / "out").exists()
        assert listing(place) == before
        assert any(word in line for line in lines for word in mutation.words), lines
        return "refused"
    assert converted.exit_code == 0, converted.stderr
    assert meaning(folder) == meaning(original), "accepted in silence"
    assert {n: t.tolist() for n, t in weights(folder).items()} == {n: t.tolist() for n, t in weights(original).items()}
    assert listing(place) - before == {"out", "out/config.json", "out/model.safetensors"}
    return "the same"


def refusals(ran: Result) -> list[str]:
    assert "Traceback" not in ran.stderr + ran.stdout
    if ran.exit_code == 2:
        assert ran.stdout == ""
        lines = ran.stderr.splitlines()
        assert len(lines) == 1
        return lines
    assert ran.stderr == ""
    data = json.loads(ran.stdout, parse_constant=lambda word: pytest.fail(f"{word} is not valid JSON"))
    lines = [problem["line"] for problem in data["problems"] if problem["severity"] == "error"]
    assert ran.exit_code == (1 if lines else 0)
    for line in lines:
        assert len(line.splitlines()) == 1 and len(line) < 1500
        line.encode()
    return lines


def weights(folder: Path) -> dict:
    """What the head computes with: not the map that a full vocabulary has no use for, and never ``t2d``."""
    head, lines = read_head(folder), {}
    for name, info in head.tensors.items():
        tensor = load_file(folder / info.file)[info.name].float()
        lines[name] = tensor.flatten() if name == "mask_hidden" else tensor
    unused = {"t2d", "d2t"} if head.draft_vocab_size == head.vocab_size else {"t2d"}
    return {name: tensor for name, tensor in lines.items() if name not in unused}


def listing(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*")}


@pytest.mark.parametrize("step", [STEP, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", HEADS)
def test_mutations(name: str, step: int, tmp_path: Path):
    original, target = HEADS[name]().save(tmp_path / "original"), write_target(tmp_path / "target")
    seen: Counter[str] = Counter()
    for number, mutation in enumerate(list(mutations(HEADS[name]()))[::step]):
        try:
            seen[judge(HEADS[name](), mutation, tmp_path / str(number), original, target)] += 1
        except AssertionError as error:
            raise AssertionError(f"{name}: {mutation.name}: {error}") from error
    print(f"{name}: {dict(seen)}")
    assert seen["refused"] > 20 and seen["the same"] > 0
