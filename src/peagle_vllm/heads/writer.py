"""Writing a head: a folder that appears whole or not at all, and a safetensors file written in pieces.

safetensors' own writer wants every tensor in memory, which a head of several gigabytes would fill.
"""

import fcntl
import glob
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from peagle_vllm.heads.files import HeadError, TensorInfo, is_finite, one_line, read_pieces

PARTIAL = ".partial"


@dataclass(frozen=True)
class Part:
    """One tensor to write.

    Attributes:
        info: its new name, shape and dtype.
        source: (folder, the tensor there), or the bytes themselves.
    """

    info: TensorInfo
    source: tuple[Path, TensorInfo] | bytes


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


def write_safetensors(path: Path, parts: Sequence[Part], on_write: Callable[[int], object]) -> None:
    """Write tensors in one file, piece by piece.

    Args:
        on_write: called with the number of bytes after each piece.

    Raises:
        HeadError: a source cannot be read, or holds NaN or Inf.
    """
    # Wide numbers first keeps every tensor aligned, as the safetensors library does it.
    ordered = sorted(parts, key=lambda part: (-part.info.bits, part.info.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for info in (part.info for part in ordered):
        begin, end = end, end + info.num_bytes
        header[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for part in ordered:
            for raw in [part.source] if isinstance(part.source, bytes) else read_pieces(*part.source):
                if not is_finite(raw, part.info.dtype):
                    where = path if isinstance(part.source, bytes) else part.source[0] / part.source[1].file
                    raise HeadError(
                        f"{part.info.name} holds NaN or Inf: {where}; take the weights from their source again"
                    )
                file.write(raw)
                on_write(len(raw))


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
