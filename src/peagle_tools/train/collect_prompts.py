"""Prompts of any data set, or of the target's own, without answers.

Answers in a data set are another model's, often under terms that forbid to train on them, and text that the target
would not say. So only what systems and users said is kept; the target answers each user's turn itself.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

from peagle_tools.shared.conversations import UnusableRow, conversation
from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.prompt_files import Row, read_rows
from peagle_tools.train.from_target import sampled
from peagle_tools.train.lines import write_lines
from peagle_tools.train.peagle_yaml import Config
from peagle_vllm.heads.files import one_line

SHORTEST, LONGEST = 15, 600  # characters of a prompt that the target writes
GRAM, NEAR = 4, 0.5  # words, and the share of them that two near texts have in common


def prompts(config: Config) -> str:
    """Write ``prompts.jsonl``, whole or not at all: {id, messages, source} a line.

    They are of the data sets, and of the target's own where ``from_target`` says so, in the order of their ids, which
    are hashes: the first ones are a random share. ToolError where a data set cannot be read, or no prompt is left.

    Returns:
        Counts of rows, and of those that hold no prompt by reason, with the place of the first.
    """
    data, out = config.data, config.run / "prompts.jsonl"
    if not data.prompts and not data.from_target:
        raise ToolError("data.prompts: is empty; name files, or data sets of the hub, or set from_target")
    counts = Counter(rows=0, duplicates=0)
    unusable: dict[str, list[str]] = {}
    rows: dict[str, dict[str, Any]] = {}
    from_sources = (_prompts(source, counts, unusable) for source in data.prompts)
    from_target = sampled(config, out.with_suffix(".sampled.jsonl")) if data.from_target else ()
    for row in chain(*from_sources, _usable(from_target, counts)):
        counts["duplicates"] += row["id"] in rows
        rows.setdefault(row["id"], row)
    others = chain(*(_prompts(source, Counter(), {}) for source in data.apart_from))
    measured = [text for row in others for text in grams(row)]
    kept = [rows[key] for key in sorted(rows) if not is_near(rows[key], measured)]
    counts.update({"near to a measured prompt": len(rows) - len(kept), "kept": len(kept)})
    reasons = {reason: f"{len(places)}, first {places[0]}" for reason, places in unusable.items()}
    if not kept:
        why = json.dumps({**counts, **reasons})
        raise ToolError(f"no prompt is left of {', '.join(data.prompts) or 'the target'}: {why}")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_lines(out, kept)
    return json.dumps({"rows": counts, "unusable rows": reasons}, indent=2)


def _prompts(source: str, counts: Counter[str], unusable: dict[str, list[str]]) -> Iterator[dict[str, Any]]:
    """{id, messages, source} of each row that holds a prompt; of the others, where they stand by reason."""
    name = Path(source).name if Path(source).exists() else source
    for place, row in _rows(source):
        counts["rows"] += 1
        try:
            messages = conversation(row, with_answers=False)
        except UnusableRow as error:
            unusable.setdefault(error.reason, []).append(place)
        else:
            yield {"id": _id(messages), "messages": messages, "source": name + place.removeprefix(source)}


def _id(messages: list[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:16]


def _usable(sampled: Iterable[dict[str, Any]], counts: Counter[str]) -> Iterator[dict[str, Any]]:
    """{id, messages, source} of each prompt of the target's that is whole, and neither short nor long."""
    for number, row in enumerate(sampled, start=1):
        counts["written by the target"] += 1
        if row["end"] != "stop":
            counts["not ended" if row["end"] == "length" else f"with a {row['end']}"] += 1
        elif not SHORTEST <= len(row["messages"][-1]["content"]) <= LONGEST:
            counts[f"outside {SHORTEST} to {LONGEST} characters"] += 1
        else:
            yield {"id": _id(row["messages"]), "messages": row["messages"], "source": f"target:{number}"}


def is_near(row: dict[str, Any], measured: list[set[tuple[str, ...]]]) -> bool:
    """Whether a text of ``row`` is near to one of the ``measured`` ones, which are their grams.

    Two texts are near when they share half of the runs of 4 words that the shorter one has: reworded in some places, or
    one within the other.
    """
    pairs = product(grams(row), measured)
    return any(0 < NEAR * min(len(text), len(other)) <= len(text & other) for text, other in pairs)


def grams(row: dict[str, Any]) -> list[set[tuple[str, ...]]]:
    """The runs of 4 words of each user's turn, or all its words where it has fewer."""
    turns = (message["content"] for message in row["messages"] if message["role"] == "user")
    texts = filter(None, (re.findall(r"\w+", turn.lower()) for turn in turns))
    return [{tuple(words[at : at + GRAM]) for at in range(max(len(words) - GRAM, 0) + 1)} for words in texts]


def _rows(source: str) -> Iterator[Row]:
    """The rows of a file, or of a data set of the hub, each with its place."""
    if Path(source).is_file():
        yield from read_rows(Path(source))
        return
    from datasets import load_dataset

    name, split = source.partition(":")[::2]
    try:
        rows = load_dataset(name, split=split or "train", streaming=True)
        yield from ((f"{source}:{number}", row) for number, row in enumerate(rows, start=1))
    except Exception as error:  # the library has many kinds
        remedy = "name a file of prompts, or a data set of the hub, ORG/NAME[:SPLIT]"
        raise ToolError(f"{source} cannot be read ({one_line(error)}); {remedy}") from None
