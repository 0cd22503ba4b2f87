"""Prompt files: the one reader of ``tune``, ``bench``, ``sharpen``, ``diagnose``, ``convert`` and ``train prompts``.

.jsonl            an object a line
.json             an array of objects, or an object a line
.csv .tsv         a row each, with a header
.parquet          a row each
.txt and others   a prompt a line, as text or as an object; or an array of objects
"""

import csv
import json
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from peagle_tools.shared.conversations import Messages, UnusableRow, conversation, unanswered
from peagle_tools.shared.errors import ToolError
from peagle_vllm.heads.files import one_line
from peagle_vllm.heads.target import control_tokens

KINDS = ("", ".txt", ".jsonl", ".ndjson", ".json")  # and those of tables
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
    kind = path.suffix.lower()
    try:
        if kind == ".parquet":
            yield from _parquet_rows(path)
        elif kind in (".csv", ".tsv"):
            yield from _table_rows(path, "," if kind == ".csv" else "\t")
        elif kind in KINDS:
            yield from _text_rows(path, path.read_text(encoding="utf-8-sig"))
        else:
            fix = "name it .txt where each line is a prompt, or .jsonl"
            raise ToolError(f"{path} is no prompt file by its name; {fix}")
    except UnicodeDecodeError:
        raise ToolError(f"{path} cannot be read (not UTF-8 text); write it as UTF-8, or as .parquet") from None
    except OSError as error:
        raise ToolError(f"{path} cannot be read ({one_line(error.strerror or error)}); name a file") from None


def _text_rows(path: Path, text: str) -> Iterator[Row]:
    kind, is_list = path.suffix.lower(), text.lstrip().startswith("[")
    is_json = kind in (".json", ".jsonl", ".ndjson")
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


def _line(line: str, place: str, is_json: bool) -> Any:
    if not is_json and not line.lstrip().startswith("{"):
        return line
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        fix = 'write {"prompt": "..."}' + (", or name a file of texts .txt" if is_json else ", or text")
        raise ToolError(f"{place} is not valid JSON; {fix}") from None


def _table_rows(path: Path, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter=delimiter)
        try:
            for row in reader:
                place = f"{path}:{reader.line_num}"
                if None in row:
                    fix = "put quotes around text that holds a comma"
                    raise ToolError(f"{place} has more cells than the header; {fix}")
                yield place, {key: cell for key, cell in row.items() if cell}
        except csv.Error as error:
            raise ToolError(f"{path}:{reader.line_num} is no row of a table ({error}); write it again") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError:
        raise ToolError(f"{path}: pyarrow reads it and is missing; install it, or write JSON lines") from None
    try:
        with path.open("rb") as file:
            batches = (batch.to_pylist() for batch in parquet.ParquetFile(file).iter_batches())
            yield from ((f"{path}: row {number}", row) for number, row in enumerate(chain.from_iterable(batches), 1))
    except ArrowException as error:
        raise ToolError(f"{path} is no Parquet file ({one_line(error)}); write it again") from None
