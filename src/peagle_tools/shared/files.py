"""Files that are there whole or not at all."""

import os
from pathlib import Path


def write_whole(file: Path, text: str, partial: Path | None = None) -> None:
    """Write whole or not at all: into ``partial`` (without it into a file beside ``file``), which is then renamed."""
    partial = partial or file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with partial.open("w") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
