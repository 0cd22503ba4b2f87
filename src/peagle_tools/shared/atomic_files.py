"""Files and folders that are there whole or not at all."""

import errno
import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from peagle_tools.shared.errors import ToolError
from peagle_vllm.heads.files import one_line

PARTIAL = ".partial"


def write_whole(file: Path, content: str | bytes) -> None:
    """Write whole or not at all: into a file next to ``file``, which is then renamed. ToolError where it cannot be."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(partial)
        partial.replace(file)
    except OSError as error:
        reason = one_line(error.strerror or error)
        raise ToolError(f"{file} cannot be written ({reason}); fix that, and run the command again") from None
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``out`` at the end; on any error nothing is left.

    A process that is killed meanwhile leaves a hidden sibling of ``out``, which the next call for ``out`` removes.
    ToolError where ``out`` exists, or cannot be written.
    """
    out = Path(os.path.normpath(out))
    if os.path.lexists(out):
        raise ToolError(f"{out} exists; name a folder that does not, nothing is overwritten")
    if not out.parent.is_dir():
        raise ToolError(f"{out.parent} is not a folder; make it first")
    for left in out.parent.glob(f".{glob.escape(out.name)}.*{PARTIAL}"):
        with suppress(OSError), locked(left, OSError()) as is_held:  # else another process writes there, or may
            if is_held:
                shutil.rmtree(left, ignore_errors=True)
    try:
        with (
            TemporaryDirectory(PARTIAL, f".{out.name}.", out.parent, ignore_cleanup_errors=True) as private,
            locked(Path(private), OSError()),
        ):
            work = Path(private) / "head"  # TemporaryDirectory itself is closed to other users
            work.mkdir()
            yield work
            for path in (*work.rglob("*"), work):
                sync(path)
            if os.path.lexists(out):
                raise ToolError(f"{out} has appeared meanwhile; nothing is overwritten")
            work.rename(out)
            sync(out.parent)
    except OSError as error:
        reason = one_line(error.strerror or error)
        raise ToolError(f"{out} cannot be written ({reason}); nothing is left of it") from None


@contextmanager
def locked(folder: Path, failure: Exception) -> Iterator[bool]:
    """Hold a folder's lock, which ends with the process at the latest. ``failure`` where another process holds it.

    Yields whether it is held: on a file system without locks (Lustre, unless mounted with them) nobody holds any.
    """
    descriptor, is_held = os.open(folder, os.O_RDONLY), True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise failure from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
            is_held = False
        yield is_held
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
