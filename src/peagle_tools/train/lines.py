"""Files with JSON in each line."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from peagle_tools.shared.atomic_files import write_whole
from peagle_tools.shared.errors import ToolError


def read_lines(file: Path, must_exist: bool = True, needs: Iterable[str] = ()) -> Iterator[dict[str, Any]]:
    """The rows of a file, none of one that need not exist; a last line that was cut off is left out.

    ToolError where it cannot be read, or a line is no JSON object with the keys that it ``needs``.
    """
    if not must_exist and not file.exists():
        return
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.endswith(b"\n") and line.strip():
                    row = json.loads(line)
                    if missing := [key for key in needs if not isinstance(row, dict) or key not in row]:
                        what = f"has no {', '.join(missing)}"
                        raise ToolError(f"{file}:{number}: {what}; correct or remove that line")
                    yield row
    except OSError as error:
        raise ToolError(f"{file}: cannot be read ({error.strerror}); the step before makes it") from None
    except ValueError as error:
        raise ToolError(f"{file}:{number}: is no JSON ({error}); correct or remove that line") from None


def add_line(file: Path, row: dict[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write ``rows`` whole or not at all; they may come from ``file`` itself."""
    write_whole(file, b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
