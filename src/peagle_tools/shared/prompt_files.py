"""Prompt files: the one reader of ``tune``, ``bench``, ``sharpen``, ``diagnose``, ``convert`` and ``train prompts``.

.jsonl .ndjson .json    an object a line, or a list of objects
.txt, no suffix         a prompt a line, as text or as an object, or a list of objects
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peagle_tools.shared.conversations import Messages, UnusableRow, conversation, unanswered
from peagle_tools.shared.errors import ToolError
from peagle_vllm.heads.files import one_line

JSON = (".jsonl", ".ndjson", ".json")
Row = tuple[str, Any]  # where it stands, for a message; text, or what JSON holds


def read_prompts(path: Path) -> list[Messages]:
    """Conversations up to the turn that the target is to answer; a note on stderr counts those that went further."""
    conversations = read_conversations(path)
    prompts = [unanswered(messages) for messages in conversations]
    if shorter := sum(prompt != whole for prompt, whole in zip(prompts, conversations, strict=True)):
        line = f"{shorter} of {len(prompts)} conversations are asked without their last turns, for the target answers"
        print(f"note: {path}: {line}", file=sys.stderr)
    return prompts


def read_conversations(path: Path) -> list[Messages]:
    """The conversations of a file, whole. ToolError where it is empty, or a row holds no conversation in text."""
    conversations = []
    for place, row in read_rows(path):
        try:
            conversations.append(conversation(row))
        except UnusableRow as error:
            raise ToolError(f"{place} {error}") from None
    if not conversations:
        raise ToolError(f"{path} holds no prompt; write one a line")
    return conversations


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file. Raises ToolError where they cannot be read."""
    text, is_json = _read_text(path), path.suffix.lower() in JSON
    if re.match(r"\s*\[" if is_json else r"\s*\[\s*\{", text):
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError) as error:
            place = f"{path}:{getattr(error, 'lineno', 1)}"
            raise ToolError(f"{place} is not valid JSON ({one_line(error)}); write the list again") from None
        yield from ((f"{path}: entry {number}", row) for number, row in enumerate(rows, start=1))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        place, is_object = f"{path}:{number}", is_json or line.lstrip().startswith("{")
        try:
            if line.strip():
                yield place, json.loads(line) if is_object else line
        except (ValueError, RecursionError):
            fix = 'write {"prompt": "..."} in one line' + ", or name a file of texts .txt" * is_json
            raise ToolError(f"{place} is not valid JSON; {fix}") from None


def _read_text(path: Path) -> str:
    if path.suffix.lower() not in (*JSON, ".txt", ""):
        fix = "make a .jsonl of it, or name it .txt where each line is a prompt"
        raise ToolError(f"{path} is no prompt file (.jsonl, .ndjson, .json, .txt); {fix}")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ToolError(f"{path} cannot be read (not UTF-8 text); write it as UTF-8") from None
    except OSError as error:
        raise ToolError(f"{path} cannot be read ({one_line(error.strerror or error)}); name a file") from None
