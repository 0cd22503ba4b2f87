"""Prompts of any data set, or of the target's own, without answers and without personal data.

Answers in a data set are another model's, often under terms that forbid to train on them, and text that the target
would not say. So only what systems and users said is kept; the target answers each user's turn itself.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from peagle_tools.shared.atomic_files import write_whole
from peagle_tools.shared.conversations import UnusableRow, conversation
from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.prompt_files import Row, read_rows
from peagle_tools.train.from_target import sampled
from peagle_tools.train.lines import write_lines
from peagle_tools.train.peagle_yaml import Config
from peagle_vllm.heads.files import one_line
from peagle_vllm.heads.target import control_tokens

KINDS = {
    "EMAIL_ADDRESS": "e-mail addresses",
    "CREDIT_CARD": "card numbers",
    "IBAN_CODE": "IBANs",
    "PHONE_NUMBER": "phone numbers (international ones; national ones of US, GB, DE, FR, IL, IN, CA, BR)",
    "IP_ADDRESS": "IP addresses",
}
NAMES = {"PERSON": "names", "LOCATION": "places"}  # only a model finds them
NOBODYS = ["127.0.0.1", "0.0.0.0", "255.255.255.255", "::1"]
LEAST_SCORE = 0.4  # presidio's of a phone number; what a checksum or a domain confirms has 1
FEW = 1000  # prompts that are searched here: a process takes seconds to start
CHUNK = 64  # prompts handed to a process at once
SHORTEST, LONGEST = 15, 600  # characters of a prompt that the target writes
GRAM, NEAR = 4, 0.5  # words, and the share of them that two near texts have in common


def prompts(config: Config) -> str:
    """Write ``prompts.jsonl``, whole or not at all: {id, messages, source} a line.

    They are of the data sets, and of the target's own where ``from_target`` says so, in the order of their ids, which
    are hashes: the first ones are a random share. Rows that are dropped are listed in ``.dropped.jsonl``
    without their text, with what they are near to or {kind: count} of their personal data.

    Returns:
        The report, also in ``.report.json``: counts of rows, of personal data by kind, what was looked for, what not.

    Raises:
        ToolError: presidio is not installed; a data set that cannot be read, or from which nothing is left.
    """
    data, out = config.data, config.run / "prompts.jsonl"
    if not data.prompts and not data.from_target:
        raise ToolError("data.prompts: is empty; name files, or data sets of the hub, or set from_target")
    if data.pii == "presidio" and not find_spec("presidio_analyzer"):
        remedy = 'pip install "peagle-vllm[pii]", or set `pii: none` in data'
        raise ToolError(f"presidio_analyzer is not installed: {remedy}")
    counts = Counter(rows=0, duplicates=0)
    unusable: dict[str, list[str]] = {}
    rows: dict[str, dict[str, Any]] = {}
    control = control_tokens(config.target)
    from_sources = (_prompts(source, control, counts, unusable) for source in data.prompts)
    from_target = sampled(config, out.with_suffix(".sampled.jsonl")) if data.from_target else ()
    for row in chain(*from_sources, _usable(from_target, counts)):
        counts["duplicates"] += row["id"] in rows
        rows.setdefault(row["id"], row)
    measured = [
        (row["source"], text)
        for source in data.apart_from
        for row in _prompts(source, None, Counter(), {})
        for text in _user_grams(row)
    ]
    sources = {key: near_to(rows[key], measured) for key in sorted(rows)}
    apart = [rows[key] for key, source in sources.items() if not source]
    dropped = [{**rows[key], "messages": None, "near": source} for key, source in sources.items() if source]
    counts["near to a measured prompt"] = len(dropped)
    kinds = {} if data.pii == "none" else KINDS | (NAMES if data.ner else {})
    searching = partial(search, kinds=list(kinds), ner=data.ner)
    if len(apart) <= FEW or not kinds:
        personal = list(map(searching, apart))
    else:
        with get_context("spawn").Pool() as pool:
            personal = pool.map(searching, apart, CHUNK)
    searched = list(zip(apart, personal, strict=True))
    kept = [row for row, hits in searched if not hits]
    dropped += [{**row, "messages": None, "pii": hits} for row, hits in searched if hits]
    counts["dropped for personal data"], counts["kept"] = len(apart) - len(kept), len(kept)
    reasons = {reason: f"{len(places)}, first {places[0]}" for reason, places in unusable.items()}
    report = {
        "rows": dict(counts),
        "unusable rows": reasons,
        "personal data found": dict(sorted(sum(personal, Counter()).items())),
        "looked for": list(kinds.values()),
        "NOT looked for": [name for kind, name in (KINDS | NAMES).items() if kind not in kinds],
    }
    if not kept:
        why = json.dumps({**counts, **reasons})
        raise ToolError(f"no prompt is left of {', '.join(data.prompts) or 'the target'}: {why}")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_lines(out.with_suffix(".dropped.jsonl"), dropped)
    write_lines(out, kept)
    text = json.dumps(report, indent=2)
    write_whole(out.with_suffix(".report.json"), text + "\n")
    return text


def _prompts(
    source: str, control: re.Pattern[str] | None, counts: Counter[str], unusable: dict[str, list[str]]
) -> Iterator[dict[str, Any]]:
    """{id, messages, source} of each row that holds a prompt; of the others, where they stand by reason."""
    name = Path(source).name if Path(source).exists() else source
    for place, row in _rows(source):
        counts["rows"] += 1
        try:
            messages = [turn for turn in conversation(row, control) if turn["role"] != "assistant"]
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


def near_to(row: dict[str, Any], measured: Iterable[tuple[str, set[tuple[str, ...]]]]) -> str | None:
    """The source of one of the ``measured`` texts, each (source, grams), that a text of ``row`` is near to, or None.

    Two texts are near when they share half of the runs of 4 words that the shorter one has: reworded in some places, or
    one within the other.
    """
    for text in _user_grams(row):
        for source, other in measured:
            if 0 < NEAR * min(len(text), len(other)) <= len(text & other):
                return source
    return None


def grams(text: str) -> set[tuple[str, ...]]:
    """The runs of 4 words of a text, or all its words where it has fewer."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + GRAM]) for start in range(max(len(words) - GRAM, 0) + 1)} if words else set()


def _user_grams(row: dict[str, Any]) -> list[set[tuple[str, ...]]]:
    """Those of each user's turn."""
    return [grams(message["content"]) for message in row["messages"] if message["role"] == "user"]


def _rows(source: str) -> Iterator[Row]:
    """The rows of a file, a preset, or a data set of the hub, each with its place."""
    if Path(source).is_file():
        yield from read_rows(Path(source))
        return
    from datasets import load_dataset
    from speculators.data_generation.configs import DATASET_CONFIGS

    try:
        if preset := DATASET_CONFIGS.get(source):
            rows = load_dataset(preset.hf_path, name=preset.subset, split=preset.split, streaming=True)
        else:
            name, split = source.partition(":")[::2]
            rows = load_dataset(name, split=split or "train", streaming=True)
        yield from ((f"{source}:{number}", row) for number, row in enumerate(rows, start=1))
    except Exception as error:  # the library has many kinds
        remedy = "name a file of prompts, or a data set of the hub, ORG/NAME[:SPLIT]"
        raise ToolError(f"{source} cannot be read ({one_line(error)}); {remedy}") from None


@cache
def analyzer(ner: str | None) -> Any:
    """presidio, without a language model of its own; made once in each process."""
    import tldextract
    from presidio_analyzer import AnalyzerEngine, RecognizerRegistry, predefined_recognizers
    from presidio_analyzer.nlp_engine import NoOpNlpEngine

    # The list of domains that the package brings along; else the first e-mail address would fetch one.
    tldextract.tldextract.TLD_EXTRACTOR = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)
    kinds = ("EmailRecognizer", "CreditCardRecognizer", "IbanRecognizer", "PhoneRecognizer", "IpRecognizer")
    recognizers = [getattr(predefined_recognizers, kind)() for kind in kinds]
    if ner:
        model = predefined_recognizers.HuggingFaceNerRecognizer
        recognizers.append(model(model_name=ner, supported_entities=list(NAMES)))
    blank = NoOpNlpEngine([{"lang_code": "en", "model_name": "none"}])
    return AnalyzerEngine(RecognizerRegistry(recognizers), blank, supported_languages=["en"])


def search(row: dict[str, Any], kinds: list[str], ner: str | None) -> Counter[str]:
    """How often the messages of a row hold personal data of each kind."""
    counts: Counter[str] = Counter()
    for message in row["messages"] if kinds else []:
        hits = analyzer(ner).analyze(message["content"], "en", kinds, score_threshold=LEAST_SCORE, allow_list=NOBODYS)
        counts.update(hit.entity_type for hit in hits)
    return counts
