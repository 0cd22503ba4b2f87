"""Mutations of a head, one fault each: every field of its config, every tensor, and the files themselves.

A mutated head must be refused by a line that names what was touched, or mean exactly what it meant before; the few
mutations that make another, valid head are left out here (``_is_valid_too``).
"""

import copy
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        name: for the test's report.
        names: words of which the refusing line must hold one.
        change: edits the head before it is written.
        damage: edits the written folder.
    """

    name: str
    names: tuple[str, ...]
    change: Callable[[Written], object] = lambda head: None
    damage: Callable[[Path], object] = lambda folder: None


def mutations(head: Written) -> Iterator[Mutation]:
    """Every mutation of ``head``, which is not changed."""
    yield from _of_fields(head.config)
    yield from _of_tensors(head)
    yield from _of_files() if head.shards == 1 else _of_shards()


# -------------------------------------------------------------------------------------------- config


def _of_fields(config: dict[str, Any]) -> Iterator[Mutation]:
    for path in _paths(config):
        key = next(part for part in reversed(path) if isinstance(part, str))
        label, old = ".".join(map(str, path)), _at(config, path)
        words = (key, *old) if isinstance(old, dict) else (key,)
        words += ("no mask token id",) if key in ("mask_token_id", "ptd_token_id") else ()
        words += ("correct the sizes in config.json",) if key in SIZES else ()  # only the weights tell that it is wrong
        if not isinstance(old, bool):
            yield Mutation(f"{label} deleted", words, _editing(path, _delete))
        for value in BAD_VALUES:
            if not _is_valid_too(old, value, key):
                yield Mutation(f"{label} = {value!r}", words, _editing(path, _putting(value)))
    for key, value in (("auto_map", {"AutoModel": "evil.Model"}), ("comment", "x"), ("quantization_config", "x")):
        yield Mutation(f"{key} added", (key,), _editing((key,), _putting(value)))


def _paths(node: Any, path: tuple = ()) -> Iterator[tuple]:
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inner:
        yield (*path, key)
        yield from _paths(value, (*path, key))


def _at(node: Any, path: tuple) -> Any:
    for key in path:
        node = node[key]
    return node


def _editing(path: tuple, edit: Callable[[Any, Any], None]) -> Callable[[Written], None]:
    return lambda head: edit(_at(head.config, path[:-1]), path[-1])


def _delete(node: Any, key: Any) -> None:
    del node[key]


def _putting(value: Any) -> Callable[[Any, Any], None]:
    def put(node: Any, key: Any) -> None:
        node[key] = copy.deepcopy(value)

    return put


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
    return key == "max_position_embeddings" and new == 1 and not isinstance(new, bool)


# ------------------------------------------------------------------------------------------- tensors


def _of_tensors(head: Written) -> Iterator[Mutation]:
    names = sorted(head.tensors)
    for name in names:
        tensor = head.tensors[name]
        words = (name.removeprefix("model.").replace("midlayer.", "layers.0.").removesuffix(".weight"), name)
        words += ("layers",) if "layer" in name else ()
        full = head.config["draft_vocab_size"] == head.layer_config["vocab_size"]
        if not (words[0] == "embed_tokens" or (words[0] == "lm_head" and full)):  # then the target's is taken
            yield Mutation(f"{name} dropped", words, _replacing(name, lambda t: None))
        yield Mutation(f"{name} renamed", (*words, "x"), _renaming(name, "x." + name))
        for label, make in _TENSOR_EDITS.items():
            yield Mutation(f"{name} {label}", words, _replacing(name, make))
        other = names[(names.index(name) + 1) % len(names)]
        if head.tensors[other].shape != tensor.shape:
            last = other.rsplit(".", 1)[0].removeprefix("model.").replace("midlayer.", "layers.0.")
            yield Mutation(f"{name} and {other} swapped", (*words, last), _swapping(name, other))


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor[:1]])


def _holed(value: float) -> Callable[[torch.Tensor], torch.Tensor | None]:
    def make(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        if tensor.is_floating_point():
            tensor.view(-1)[-1] = value
        return tensor

    return make


_TENSOR_EDITS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "one row longer": _widened,
    "one row shorter": lambda tensor: tensor[:-1].contiguous(),
    "empty": lambda tensor: tensor[:0].contiguous(),
    "one number": lambda tensor: tensor.reshape(-1)[0].clone(),
    "with another dimension": lambda tensor: tensor[..., None].contiguous(),
    "of whole numbers": lambda tensor: tensor.to(torch.int32) if tensor.is_floating_point() else tensor.float(),
    "of flags": lambda tensor: tensor.bool(),
    "of fp8": lambda tensor: tensor.float().to(torch.float8_e4m3fn),
    "with NaN": _holed(float("nan")),
    "with Inf": _holed(float("inf")),
    "with -Inf": _holed(float("-inf")),
    "in double precision": lambda tensor: tensor.double() if tensor.is_floating_point() else tensor,
}


def _replacing(name: str, make: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Written], None]:
    def change(head: Written) -> None:
        made = make(head.tensors.pop(name))
        if made is not None:
            head.tensors[name] = made

    return change


def _renaming(name: str, to: str) -> Callable[[Written], None]:
    def change(head: Written) -> None:
        head.tensors[to] = head.tensors.pop(name)

    return change


def _swapping(one: str, other: str) -> Callable[[Written], None]:
    def change(head: Written) -> None:
        head.tensors[one], head.tensors[other] = head.tensors[other], head.tensors[one]

    return change


# --------------------------------------------------------------------------------------------- files


def _of_files() -> Iterator[Mutation]:
    for where, file in (("config", CONFIG), ("weights", WEIGHTS)):
        for label, damage in _FILE_DAMAGES.items():
            yield Mutation(f"{where} {label}", (file, "*.safetensors"), damage=_damaging(file, damage))
    for at in (0, 7, 9, 60, 400, 2000):
        yield Mutation(f"weights cut at {at}", (WEIGHTS,), damage=_damaging(WEIGHTS, _cutting(at)))
    for length in (0, 1, 2**20, 101 << 20, 2**40, 2**64 - 1):
        yield Mutation(f"header of {length} bytes", (WEIGHTS,), damage=_damaging(WEIGHTS, _header_length(length)))
    for target in (
        "../elsewhere.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "",
        "absent.safetensors",
        3,
        None,
    ):
        yield Mutation(f"index names {target!r}", ("weight_map", "it is missing"), damage=_index({"fc.weight": target}))
    for content in ({}, [], "x", None):
        yield Mutation(f"weight_map {content!r}", ("weight_map",), damage=_index(content))
    yield Mutation("index promises more", ("lacks more",), damage=_index({"more": WEIGHTS}))
    yield Mutation("index is no JSON", ("index.json",), damage=lambda f: _index_file(f).write_text("{"))
    yield Mutation("index without end", ("index.json",), damage=lambda f: _index_file(f).symlink_to("/dev/zero"))


def _of_shards() -> Iterator[Mutation]:
    """An index and its two files."""
    first = "model-00001-of-00002.safetensors"
    for label, damage in _FILE_DAMAGES.items():
        yield Mutation(f"shard {label}", (first,), damage=_damaging(first, damage))
        yield Mutation(f"index {label}", ("index.json", "weight_map"), damage=_damaging(_INDEX, damage))
    yield Mutation("index promises a tensor more", ("lacks more",), damage=_reindex(lambda m: m.update(more=first)))
    yield Mutation("index swaps its files", ("lacks",), damage=_reindex(_swap_files))
    yield Mutation("index forgets a file", ("missing",), damage=_reindex(_forget(first)))


def _reindex(edit: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        index = json.loads((folder / _INDEX).read_text())
        edit(index["weight_map"])
        (folder / _INDEX).write_text(json.dumps(index))

    return damage


def _swap_files(weight_map: dict[str, str]) -> None:
    one, other = sorted(set(weight_map.values()))
    weight_map.update({name: one if file == other else other for name, file in weight_map.items()})


def _forget(file: str) -> Callable[[dict[str, str]], None]:
    def forget(weight_map: dict[str, str]) -> None:
        for name in [name for name, where in weight_map.items() if where == file]:
            del weight_map[name]

    return forget


def _damaging(file: str, damage: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: damage(folder / file)


def _linked_to(where: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        path.symlink_to(where)

    return damage


def _moved_out(path: Path) -> None:
    """A link out of the folder to the very file, as the hub's cache has them: that is fine."""
    outside = path.parent.parent / f"outside-{path.name}"
    path.rename(outside)
    path.symlink_to(outside)


def _as(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


_FILE_DAMAGES: dict[str, Callable[[Path], object]] = {
    "deleted": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "of noise": lambda path: path.write_bytes(bytes(range(256)) * 8),
    "without end": _linked_to("/dev/zero"),
    "a broken link": _linked_to("nowhere"),
    "a link to itself": lambda path: _linked_to(path.name)(path),
    "a link to a folder": _linked_to(".."),
    "a link out of the folder": _moved_out,
    "a link to another file": _linked_to("/etc/passwd"),
    "a folder": _as(lambda path: path.mkdir()),
    "a pipe": _as(lambda path: os.mkfifo(path)),
    "a list": lambda path: path.write_text("[1]"),
    "nested deep": lambda path: path.write_text("[" * 100_000),
    "too large": lambda path: os.truncate(path, 200 << 20),
}


def _cutting(at: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, at)


def _header_length(length: int) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])


def _index_file(folder: Path) -> Path:
    return folder / _INDEX


def _index(weight_map: Any) -> Callable[[Path], object]:
    return lambda folder: _index_file(folder).write_text(json.dumps({"weight_map": weight_map}))
