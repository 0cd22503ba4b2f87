"""YAML that remembers its lines, so that a mistake in a suite is named with file, line and key."""

from pathlib import Path
from typing import Any

import yaml

from peagle_vllm.bench.errors import BenchError

Lines = dict[tuple[str | int, ...], int]


def load(file: Path) -> tuple[dict[str, Any], Lines]:
    """The document, and the 1-based line of every key path in it.

    Raises:
        BenchError: it cannot be read, is no YAML, is no mapping, or says a key twice.
    """
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise BenchError(f"{file}: cannot be read ({reason})") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        lines: Lines = {}
        if root is not None:
            _walk(root, (), lines, file)
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise BenchError(f"{file}:{line}: no YAML: {error.problem}") from None
    if not isinstance(data, dict):
        raise BenchError(f"{file}:1: a suite is a mapping of keys to values")
    return data, lines


def _walk(node: yaml.Node, path: tuple[str | int, ...], lines: Lines, file: Path) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                where = ".".join(map(str, (*path, key.value)))
                raise BenchError(f"{file}:{key.start_mark.line + 1}: {where}: said twice")
            seen.add(key.value)
            here = (*path, key.value)
            lines[here] = key.start_mark.line + 1
            _walk(value, here, lines, file)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            _walk(value, (*path, i), lines, file)


def line_of(path: tuple[str | int, ...], lines: Lines) -> int:
    """The line of ``path``, or of the nearest key around it (a missing key has no line of its own)."""
    keys = tuple(part if isinstance(part, int) else str(part) for part in path)
    while keys and keys not in lines:
        keys = keys[:-1]
    return lines.get(keys, 1)
