"""Mutations of a head, one fault each: the fields of its config, every tensor, and the files themselves.

A mutated head must be refused by a line that names what was touched, or mean exactly what it meant before.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from peagle_vllm.heads.config import vllm_name
from tests.heads.writers import Written

BAD_VALUE = "\ud800\n"  # of any field


class Mutation(NamedTuple):
    name: str  # for the test's report
    words: tuple[str, ...]  # of which the refusing line must hold one
    change: Callable[[Written], object] = lambda head: None  # edits the head before it is written
    damage: Callable[[Path], object] = lambda folder: None  # edits the written folder


def mutations(head: Written) -> Iterator[Mutation]:
    """Every mutation of ``head``, which is not changed."""
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
        for label, make in _TENSOR_EDITS.items():
            yield Mutation(f"{name} {label}", words, partial(_replace, name=name, make=make))
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


def _replace(head: Written, name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    head.tensors[name] = make(head.tensors[name])


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
