"""Prompt files: the one reader of ``tune``, ``bench``, ``sharpen``, ``diagnose``, ``convert`` and ``train prompts``.

.jsonl .ndjson    an object a line
.json             an array of objects, or an object a line
.txt, no suffix   a prompt a line, as text or as an object; or an array of objects
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peagle_tools.shared.conversations import Messages, UnusableRow, conversation, unanswered
from peagle_tools.shared.errors import ToolError
from peagle_vllm.heads.files import one_line
from peagle_vllm.heads.target import control_tokens

JSON = (".jsonl", ".ndjson", ".json")
TEXT = (".txt", "")
TABLES = {".csv": "read_csv", ".tsv": "read_table", ".parquet": "read_parquet"}  # what pandas reads them with
Row = tuple[str, Any]  # where it stands, for a message; text, or what JSON holds


def read_prompts(path: Path, target: str | None = None) -> list[Messages]:
    """Conversations up to the turn that the target is to answer; a note on stderr counts those that went further.

    Args:
        target: the model that answers; its tokenizer's control tokens are no text. None: unknown.

    Raises:
        ToolError: as ``read_conversations``.
    """
    conversations = read_conversations(path, target)
    prompts = [unanswered(messages) for messages in conversations]
    if shorter := sum(prompt != whole for prompt, whole in zip(prompts, conversations, strict=True)):
        line = f"{shorter} of {len(prompts)} conversations are asked without their last turns, for the target answers"
        print(f"note: {path}: {line}", file=sys.stderr)
    return prompts


def read_conversations(path: Path, target: str | None = None) -> list[Messages]:
    """The conversations of a file, whole.

    Raises:
        ToolError: the file cannot be read or is empty, or a row holds no conversation in text: which, why, what to do.
    """
    tokens, conversations = control_tokens(target) if target else None, []
    for place, row in read_rows(path):
        try:
            conversations.append(conversation(row, tokens))
        except UnusableRow as error:
            raise ToolError(f"{place} {error}") from None
    if not conversations:
        raise ToolError(f"{path} holds no prompt; write one a line")
    return conversations


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file. Raises ToolError where they cannot be read."""
    text, kind = _read_text(path), path.suffix.lower()
    is_list, is_json = text.lstrip().startswith("["), kind in JSON
    if is_list or kind == ".json":
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError) as error:
            if is_list and is_json:
                line = f"{path}:{getattr(error, 'lineno', 1)}"
                raise ToolError(f"{line} is not valid JSON ({one_line(error)}); write the list again") from None
        else:
            rows = whole if isinstance(whole, list) else [whole]
            yield from ((f"{path}: entry {number}", row) for number, row in enumerate(rows, start=1))
            return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", _line(line, f"{path}:{number}", is_json)


def _read_text(path: Path) -> str:
    kind = path.suffix.lower()
    if kind not in JSON + TEXT:
        fix = "name it .txt where each line is a prompt, or .jsonl"
        if reader := TABLES.get(kind):
            fix = f'make a .jsonl of it: pandas.{reader}(FILE).to_json(OUT, orient="records", lines=True)'
        raise ToolError(f"{path} is no prompt file (.jsonl, .ndjson, .json, .txt); {fix}")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ToolError(f"{path} cannot be read (not UTF-8 text); write it as UTF-8") from None
    except OSError as error:
        raise ToolError(f"{path} cannot be read ({one_line(error.strerror or error)}); name a file") from None


def _line(line: str, place: str, is_json: bool) -> Any:
    if not is_json and not line.lstrip().startswith("{"):
        return line
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        fix = 'write {"prompt": "..."}' + (", or name a file of texts .txt" if is_json else ", or text")
        raise ToolError(f"{place} is not valid JSON; {fix}") from None
