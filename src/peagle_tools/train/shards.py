"""Hidden states in files of about a gigabyte, in place of one for each document: speculators' backend ``shards``.

The server writes a file for each document; ``pack`` puts these together, in the order of the documents, into
``rows-FIRST-LAST.safetensors``, whose names are the index. Where a shard ends depends on the lengths of the documents
only, and it has its name before the files that it replaces are removed: killed at any point, the same command ends with
the same shards.
"""

from argparse import Namespace
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from hs_connectors import FileBackend, FileTransfer, HiddenStatesBackend
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle_tools.shared.files import sync

SHARD_BYTES = 10**9
open_shard = lru_cache(maxsize=32)(lambda file: safe_open(file, "pt"))


class Shards(FileTransfer):
    """Reads a document's hidden states from its shard, or from its own file where no shard has it.

    Attributes:
        rows: those of each shard.
        shard_of: of each row that is in one.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.rows: dict[Path, range] = {}
        for file in folder.glob("rows-*.safetensors"):
            first, last = map(int, file.stem.split("-")[1:])
            self.rows[file] = range(first, last + 1)
        self.shard_of = {row: file for file, rows in self.rows.items() for row in rows}

    def whole(self) -> set[int]:
        """The rows of all shards that open."""
        found: set[int] = set()
        for file, rows in self.rows.items():
            try:
                with safe_open(file, "pt"):
                    found.update(rows)
            except (OSError, SafetensorError):
                continue
        return found

    def get_cached(self, file_idx: int) -> dict[str, Tensor] | None:
        if (shard := self.shard_of.get(file_idx)) is None:
            return super().get_cached(file_idx)
        return {name: open_shard(shard).get_tensor(f"{name}.{file_idx}") for name in ("hidden_states", "token_ids")}


@HiddenStatesBackend.register("shards")
class ShardsBackend(FileBackend):
    """speculators' backend of files, which also reads shards."""

    @staticmethod
    def from_train_args(args: Namespace, data_path: str) -> Shards:
        return Shards(Path(data_path, "hidden_states"))


def own_file(folder: Path, row: int) -> Path:
    """The file of one document."""
    return folder / f"hs_{row}.safetensors"


def spans(sizes: Iterable[int]) -> Iterator[range]:
    """The rows of each shard, of documents of so many bytes."""
    first = filled = row = 0
    for row, size in enumerate(sizes):
        if filled and filled + size > SHARD_BYTES:
            yield range(first, row)
            first, filled = row, 0
        filled += size
    yield range(first, row + 1)


def pack(folder: Path, sizes: Iterable[int]) -> None:
    """Put the files of all documents, of so many bytes, into shards."""
    for rows in spans(sizes):
        shard = folder / f"rows-{rows[0]:09}-{rows[-1]:09}.safetensors"
        if not shard.exists():
            parts: Any = ((row, load_file(own_file(folder, row))) for row in rows)
            partial = shard.with_suffix(".partial")
            save_file({f"{name}.{row}": tensor for row, part in parts for name, tensor in part.items()}, partial)
            sync(partial)
            partial.rename(shard)
            sync(folder)
        for row in rows:
            own_file(folder, row).unlink(missing_ok=True)
