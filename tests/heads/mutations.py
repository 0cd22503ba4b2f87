"""Mutations of a head, one fault each: every field of its config, every tensor, and the files themselves.

A mutated head must be refused by a line that names what was touched, or mean exactly what it meant before; the few
mutations that make another, valid head are left out here (``_is_valid_too``).
"""

import copy
import operator
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.heads.writers import Written

BAD_VALUES: tuple[Any, ...] = (
    *(None, "x", "", -1, 0, 1, 1.5, 2**70, float("nan"), float("inf")),
    *(True, False, [], [1], ["x"], {}, {"a": 1}, "\ud800\n"),
)
SIZES = ("head_dim", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
WEIGHTS, CONFIG = "model.safetensors", "config.json"


@dataclass(frozen=True)
class Mutation:
    """One fault."""

    name: str  # for the test's report
    names: tuple[str, ...]  # words of which the refusing line must hold one
    change: Callable[[Written], object] = lambda head: None  # edits the head before it is written
    damage: Callable[[Path], object] = lambda folder: None  # edits the written folder


def mutations(head: Written) -> Iterator[Mutation]:
    """Every mutation of ``head``, which is not changed."""
    yield from _of_fields(head.config)
    yield from _of_tensors(head)
    yield from _of_files()


# -------------------------------------------------------------------------------------------- config


def _of_fields(config: dict[str, Any]) -> Iterator[Mutation]:
    for path in paths(config):
        key = next(part for part in reversed(path) if isinstance(part, str))
        label, old = ".".join(map(str, path)), _at(config, path)
        words = (key, *old) if isinstance(old, dict) else (key,)
        words += ("no mask token id",) if key in ("mask_token_id", "ptd_token_id") else ()
        words += ("correct the sizes in config.json",) if key in SIZES else ()  # only the weights tell that it is wrong
        if not isinstance(old, bool):
            yield Mutation(f"{label} deleted", words, partial(_edit, path=path, edit=operator.delitem))
        for value in BAD_VALUES:
            if not _is_valid_too(old, value, key):
                yield Mutation(f"{label} = {value!r}", words, partial(_put, path=path, value=value))
    for key, value in (("auto_map", {"AutoModel": "evil.Model"}), ("comment", "x"), ("quantization_config", "x")):
        yield Mutation(f"{key} added", (key,), partial(_put, path=(key,), value=value))


def paths(node: Any, path: tuple = ()) -> Iterator[tuple]:
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inner:
        yield (*path, key)
        yield from paths(value, (*path, key))


def _at(node: Any, path: tuple) -> Any:
    for key in path:
        node = node[key]
    return node


def _edit(head: Written, path: tuple, edit: Callable[[Any, Any], object]) -> None:
    edit(_at(head.config, path[:-1]), path[-1])


def _put(head: Written, path: tuple, value: Any) -> None:
    _edit(head, path, lambda node, key: operator.setitem(node, key, copy.deepcopy(value)))


def _is_valid_too(old: Any, new: Any, key: str) -> bool:
    """Whether ``new`` is as good a value as ``old``, as far as anyone can tell from the files."""
    if type(old) is type(new) and old == new:
        return True
    if isinstance(old, bool):
        return isinstance(new, bool) or new is None
    if key in ("rms_norm_eps", "rope_theta"):
        return isinstance(new, (int, float)) and not isinstance(new, bool) and 0 < new < 1e30
    if key in ("mask_token_id", "ptd_token_id"):
        return new in (0, 1) and not isinstance(new, bool)
    if key == "eagle_aux_hidden_state_layer_ids" and isinstance(old, int):  # one of the list
        return new in (0, 1) and not isinstance(new, bool)
    return False


# ------------------------------------------------------------------------------------------- tensors


def _of_tensors(head: Written) -> Iterator[Mutation]:
    names = sorted(head.tensors)
    for name in names:
        tensor = head.tensors[name]
        words = (name.removeprefix("model.").replace("midlayer.", "layers.0.").removesuffix(".weight"), name)
        words += ("layers",) if "layer" in name else ()
        full = head.config["draft_vocab_size"] == head.layer_config["vocab_size"]
        if not (words[0] == "embed_tokens" or (words[0] == "lm_head" and full)):  # then the target's is taken
            yield Mutation(f"{name} dropped", words, partial(_replace, name=name, make=lambda tensor: None))
        yield Mutation(f"{name} renamed", (*words, "x"), partial(_rename, name=name))
        for label, make in _TENSOR_EDITS.items():
            yield Mutation(f"{name} {label}", words, partial(_replace, name=name, make=make))
        other = names[(names.index(name) + 1) % len(names)]
        if head.tensors[other].shape != tensor.shape:
            last = other.rsplit(".", 1)[0].removeprefix("model.").replace("midlayer.", "layers.0.")
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
    "with Inf": partial(_fill_last, value=float("inf")),
    "with -Inf": partial(_fill_last, value=float("-inf")),
    "in double precision": lambda tensor: tensor.double() if tensor.is_floating_point() else tensor,
}


def _replace(head: Written, name: str, make: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    changed = make(head.tensors.pop(name))
    if changed is not None:
        head.tensors[name] = changed


def _rename(head: Written, name: str) -> None:
    head.tensors["x." + name] = head.tensors.pop(name)


def _swap(head: Written, name: str, other: str) -> None:
    head.tensors[name], head.tensors[other] = head.tensors[other], head.tensors[name]


# --------------------------------------------------------------------------------------------- files


def _of_files() -> Iterator[Mutation]:
    for where, file in (("config", CONFIG), ("weights", WEIGHTS)):
        for label, damage in _FILE_DAMAGES.items():
            yield Mutation(f"{where} {label}", (file, "*.safetensors"), damage=partial(_damage, file=file, how=damage))
    for at in (0, 7, 9, 60, 400, 2000):
        cut = partial(os.truncate, length=at)
        yield Mutation(f"weights cut at {at}", (WEIGHTS,), damage=partial(_damage, file=WEIGHTS, how=cut))
    for length in (0, 1, 2**20, 101 << 20, 2**40, 2**64 - 1):
        resize = partial(_put_header_length, length=length)
        yield Mutation(f"header of {length} bytes", (WEIGHTS,), damage=partial(_damage, file=WEIGHTS, how=resize))


def _damage(folder: Path, file: str, how: Callable[[Path], object]) -> None:
    how(folder / file)


def _put_header_length(path: Path, length: int) -> None:
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])


def _link(path: Path, to: str | Path) -> None:
    path.unlink()
    path.symlink_to(to)


def _move_out(path: Path) -> None:
    """A link out of the folder to the very file, as the hub's cache has them: that is fine."""
    outside = path.parent.parent / f"outside-{path.name}"
    path.rename(outside)
    path.symlink_to(outside)


_FILE_DAMAGES: dict[str, Callable[[Path], object]] = {
    "deleted": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "of noise": lambda path: path.write_bytes(bytes(range(256)) * 8),
    "without end": partial(_link, to="/dev/zero"),
    "a broken link": partial(_link, to="nowhere"),
    "a link to itself": lambda path: _link(path, path.name),
    "a link to a folder": partial(_link, to=".."),
    "a link out of the folder": _move_out,
    "a link to another file": partial(_link, to="/etc/passwd"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a list": lambda path: path.write_text("[1]"),
    "nested deep": lambda path: path.write_text("[" * 100_000),
    "too large": partial(os.truncate, length=200 << 20),
}
