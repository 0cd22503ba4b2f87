"""Prompts of a data set: no answers, no personal data, nothing lost in silence."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from presidio_analyzer.predefined_recognizers.ner import huggingface_ner_recognizer

from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.prompts import PROMPTS
from peagle_tools.train import collect_prompts
from peagle_tools.train.from_target import opening
from peagle_tools.train.lines import read_lines, write_lines
from peagle_tools.train.peagle_yaml import Config, Data
from tests.support.models import TARGET, heldout

PLANTED = {
    "EMAIL_ADDRESS": ("jane.doe@example.com", "first+tag@mail.example.co.uk", "ops_team@sub.domain.org"),
    "CREDIT_CARD": ("4111 1111 1111 1111", "5500-0000-0000-0004", "340000000000009", "6011000000000004"),
    "IBAN_CODE": ("DE89 3704 0044 0532 0130 00", "GB29NWBK60161331926819", "FR1420041010050500013M02606"),
    "PHONE_NUMBER": ("+49 30 901820", "(212) 555-0187", "+44 20 7946 0018", "+81 3-3224-9999", "415-555-2671"),
    "IP_ADDRESS": ("203.0.113.77", "10.24.3.9", "2001:db8:85a3::8a2e:370:7334"),
}
SENTENCES = ("Please write a note about {} for me.", "{} is what the log shows; why?", "Summarise: a, b, {}, c.")


def written(tmp_path: Path, rows: list[Any], **data: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The lines of prompts.jsonl that are made of ``rows``, and the report."""
    source = tmp_path / "source.jsonl"
    write_lines(source, rows)
    config = Config(target=str(TARGET), folder=str(tmp_path), data=Data(prompts=[str(source)] if rows else [], **data))
    report = json.loads(collect_prompts.prompts(config))
    return list(read_lines(tmp_path / "prompts.jsonl")), report


def test_planted_personal_data_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one, of its kind, and nothing goes to the network for it."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("goes to the network"))
    planted = [(kind, s.format(datum)) for kind, data in PLANTED.items() for datum in data for s in SENTENCES]
    rows = [{"prompt": text} for text in ("What is a hash table?", *(text for _, text in planted))]
    lines, report = written(tmp_path, rows)
    assert [line["messages"][0]["content"] for line in lines] == ["What is a hash table?"]
    dropped = list(read_lines(tmp_path / "prompts.dropped.jsonl"))
    assert {row["messages"] for row in dropped} == {None}
    hits = {int(row["source"].rpartition(":")[2]): row["pii"] for row in dropped}
    for number, (kind, text) in enumerate(planted, start=2):
        assert kind in hits[number], text
    assert report["rows"]["dropped for personal data"] == len(planted)
    assert report["NOT looked for"] == ["names", "places"]


def test_a_model_for_token_classification_finds_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers' pipeline says of a text is a stand-in: a name in Alice, and nothing else."""

    def model(text: str) -> list[dict[str, Any]]:
        at = text.find("Alice")
        name = {"entity_group": "PER", "score": 0.9, "start": at, "end": at + 5, "word": "Alice"}
        return [name] if at >= 0 else []

    monkeypatch.setattr(huggingface_ner_recognizer, "hf_pipeline", lambda *_, **__: model)
    lines, report = written(tmp_path, [{"prompt": "Where does Alice live?"}, {"prompt": "Is Paris large?"}], ner="some")
    assert [line["messages"][0]["content"] for line in lines] == ["Is Paris large?"]
    assert report["personal data found"] == {"PERSON": 1} and report["NOT looked for"] == []


def test_a_clean_corpus_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python source, and questions of many kinds: 98 of 100 at least, searched by several processes."""
    monkeypatch.setattr(collect_prompts, "FEW", 0)
    texts = [*heldout(), *PROMPTS]
    lines, report = written(tmp_path, [{"prompt": text} for text in texts])
    assert len(lines) >= 0.98 * len(texts), report


def test_only_what_systems_and_users_said_is_kept(tmp_path: Path) -> None:
    """Each turn of a conversation stays: the target answers it itself."""
    contents = ["Be brief.", "One?", "Two?"]
    turns = [{"role": "system", "content": contents[0]}, {"role": "user", "content": contents[1]}]
    turns += [{"role": "assistant", "content": "An answer."}, {"role": "user", "content": contents[2]}]
    rows = [{"messages": turns}, {"instruction": "Do it.", "output": "An answer."}, {"prompt": "Do it."}, {"id": 7}]
    lines, report = written(tmp_path, rows, pii="none")
    assert sorted([message["content"] for message in line["messages"]] for line in lines) == [contents, ["Do it."]]
    assert [line["id"] for line in lines] == sorted({line["id"] for line in lines})
    assert nonzero(report) == {"rows": 4, "duplicates": 1, "kept": 2}
    assert report["unusable rows"] == {
        'has no text as "prompt" and no turns as "messages", but "id"': f"1, first {tmp_path / 'source.jsonl'}:4"
    }
    assert len(report["NOT looked for"]) == 7


def nonzero(report: dict[str, Any]) -> dict[str, int]:
    return {name: count for name, count in report["rows"].items() if count}


def test_a_transcript_in_the_targets_template_is_no_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model's answer would be learned as what a user says."""
    monkeypatch.setattr(collect_prompts, "control_tokens", {str(TARGET): re.compile("<user>")}.get)
    text = "<user>Why?<end><assistant>So.<end>"
    lines, report = written(tmp_path, [{"text": text}, {"text": "Why?"}], pii="none")
    assert [line["messages"][0]["content"] for line in lines] == ["Why?"]
    assert list(report["unusable rows"]) == ["is in a chat template already (<user>)"]
    with pytest.raises(ToolError, match=r"no prompt is left of .*is in a chat template already .*source.jsonl:1"):
        written(tmp_path, [{"text": text}])


def wrote(monkeypatch: pytest.MonkeyPatch, *texts: str, more: tuple = ()) -> None:
    """Let the target write these prompts, and ``more`` of (text, how it ended)."""
    ended = [*((text, "stop") for text in texts), *more]
    rows = [{"messages": [{"role": "user", "content": text}], "end": end} for text, end in ended]
    monkeypatch.setattr(collect_prompts, "sampled", lambda *_: rows)


def test_what_the_target_wrote_is_dropped_by_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept has its number, so that it can be found in what was sampled."""
    texts = ("What is a hash table?", "Too short a one", "Too short", "x" * 600, "x" * 601, "What is a hash table?")
    ends = (("This goes on", "length"), ("<|user|> of another turn", "special token"))
    wrote(monkeypatch, *texts, "Mail jane.doe@example.com a note for me.", more=ends)
    lines, report = written(tmp_path, [], from_target=1)
    assert {line["source"] for line in lines} == {"target:1", "target:2", "target:4"}
    assert nonzero(report) == {
        "written by the target": 9,
        "not ended": 1,
        "with a special token": 1,
        "outside 15 to 600 characters": 2,
        "duplicates": 1,
        "dropped for personal data": 1,
        "kept": 3,
    }


def test_what_is_near_to_a_measured_prompt_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted among prompts of other kinds: reworded, in another case and layout, within another text, cut short."""
    long = [text for text in heldout() if len(text.split()) > 10]
    assert len(long) > 20
    changes = (
        lambda words: [word if at % 12 else "something" for at, word in enumerate(words)],
        lambda words: [word.upper() for word in words],
        lambda words: ["Please", "look", "at", "this", "first", *words, "and", "say", "what", "you", "think"],
        lambda words: words[: len(words) * 2 // 3],
    )
    planted = {" ".join(change(text.split())) for text in long for change in changes}
    turns = [{"role": "user", "content": "Compose a travel blog post."}, {"role": "user", "content": PROMPTS[0]}]
    measured = tmp_path / "[v1]/measured.jsonl"  # no pattern
    measured.parent.mkdir()
    rows = [*({"messages": [{"role": "user", "content": text}]} for text in long), {"messages": turns}]
    write_lines(measured, rows)
    wrote(monkeypatch, *planted, *PROMPTS)
    lines, report = written(tmp_path, [], pii="none", from_target=1, apart_from=[str(measured)])
    assert {line["messages"][0]["content"] for line in lines} == {
        text for text in PROMPTS[1:] if 15 <= len(text) <= 600
    }
    dropped = list(read_lines(tmp_path / "prompts.dropped.jsonl"))
    assert len(dropped) == report["rows"]["near to a measured prompt"]
    assert {row["messages"] for row in dropped} == {None}
    assert f"measured.jsonl:{len(rows)}" in {row["near"] for row in dropped}


def test_the_opening_of_a_users_turn_is_what_the_chat_template_says() -> None:
    """Of templates with tokens and with plain words around a turn."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    assert opening(tokenizer) == ("<|bos|><|user|>", "<|end|>")
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"
    assert opening(tokenizer) == ("<|bos|>[INST]", "[/INST]")
    for template in ("{{ raise_exception('no') }}", "{{ messages[0]['content'] }}", "nothing of the user"):
        tokenizer.chat_template = template
        with pytest.raises(ToolError, match="the target's chat template"):
            opening(tokenizer)


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    data = Data(prompts=[str(tmp_path / "none.jsonl")])
    with pytest.raises(ToolError, match=r"none.jsonl cannot be read"):
        collect_prompts.prompts(Config(target=str(TARGET), folder=str(tmp_path), data=data))
    with pytest.raises(ToolError, match="no prompt is left"):
        written(tmp_path, [{"answer": "x"}])


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    """One that was cut off at the end is left out."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"a": 1}\n{"a": ')
    assert list(read_lines(file)) == [{"a": 1}]
    file.write_text('{"a": 1}\n{a: 1}\n')
    with pytest.raises(ToolError, match=f"^{file}:2: is no JSON .*; correct or remove that line$"):
        list(read_lines(file))
