"""Writing a head: a folder that appears whole or not at all, and a safetensors file written in pieces."""

import fcntl
import glob
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from peagle_vllm.heads.files import BITS, HeadError, data_ranges, one_line
from peagle_vllm.heads.values import Advance, is_finite, pieces

PARTIAL = ".partial"


@dataclass(frozen=True)
class Part:
    """One tensor to write: its new name and header, and its bytes, given or still in a file.

    Attributes:
        source: (safetensors file, the tensor's name there), or the bytes themselves.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: tuple[Path, str] | bytes


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``out`` at the end; on any error nothing is left.

    A process that is killed meanwhile leaves a hidden sibling of ``out``, which the next call for ``out`` removes.

    Raises:
        HeadError: ``out`` exists, or cannot be written.
    """
    out = Path(os.path.normpath(out))
    if os.path.lexists(out):
        raise HeadError(f"{out} exists; name a folder that does not, nothing is overwritten")
    if not out.parent.is_dir():
        raise HeadError(f"{out.parent} is no folder; make it first")
    _remove_leftovers(out)
    work = out.parent / f".{out.name}.{secrets.token_hex(4)}{PARTIAL}"
    try:
        work.mkdir()
        with _lock(work):
            yield work
            for path in sorted(work.iterdir()):
                _sync(path)
            _sync(work)
            if os.path.lexists(out):
                raise HeadError(f"{out} has appeared meanwhile; nothing is overwritten")
            work.rename(out)
        _sync(out.parent)
    except OSError as error:
        raise HeadError(
            f"{out} cannot be written ({one_line(error.strerror or error)}); nothing is left of it"
        ) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_safetensors(path: Path, parts: Sequence[Part], advance: Advance) -> None:
    """Write tensors in one file, PIECE bytes at a time.

    Args:
        advance: is told of bytes written.

    Raises:
        HeadError: a source cannot be read, or holds NaN or Inf.
    """
    # Wide numbers first keeps every tensor aligned, as the safetensors library does it.
    ordered = sorted(parts, key=lambda part: (-BITS[part.dtype], part.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for part in ordered:
        begin, end = end, end + _num_bytes(part)
        header[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    ranges: dict[Path, dict[str, tuple[int, int]]] = {}
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for part in ordered:
            for raw in _bytes_of(part, ranges):
                if not is_finite(raw, part.dtype):
                    where = part.source[0] if isinstance(part.source, tuple) else path
                    raise HeadError(f"{part.name} holds NaN or Inf: {where}; take the weights from their source again")
                file.write(raw)
                advance(len(raw))


def _num_bytes(part: Part) -> int:
    return math.prod(part.shape) * BITS[part.dtype] // 8


def _bytes_of(part: Part, ranges: dict[Path, dict[str, tuple[int, int]]]) -> Iterator[bytes]:
    if isinstance(part.source, bytes):
        yield part.source
        return
    source, name = part.source
    if source not in ranges:
        ranges[source] = data_ranges(source)
    try:
        with source.open("rb") as file:
            yield from pieces(file, *ranges[source][name])
    except OSError as error:
        raise HeadError(f"{name} cannot be read ({one_line(error)}): {source}; download it again") from None


def _remove_leftovers(out: Path) -> None:
    """Remove what killed processes left for ``out``; a living one holds its lock."""
    for left in out.parent.glob(f".{glob.escape(out.name)}.*{PARTIAL}"):
        try:
            with _lock(left):
                shutil.rmtree(left, ignore_errors=True)
        except OSError:
            continue


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; OSError where another process does. It ends with the process, however that ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
