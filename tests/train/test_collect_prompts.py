"""Prompts of a data set: no answers, nothing lost in silence."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.prompts import PROMPTS
from peagle_tools.train import collect_prompts
from peagle_tools.train.from_target import opening
from peagle_tools.train.lines import read_lines, write_lines
from peagle_tools.train.peagle_yaml import Config, Data
from tests.support.models import TARGET, heldout


def written(tmp_path: Path, rows: list[Any], **data: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The lines of prompts.jsonl that are made of ``rows``, and the report."""
    source = tmp_path / "source.jsonl"
    write_lines(source, rows)
    config = Config(target=str(TARGET), folder=str(tmp_path), data=Data(prompts=[str(source)] if rows else [], **data))
    report = json.loads(collect_prompts.prompts(config))
    return list(read_lines(tmp_path / "prompts.jsonl")), report


def test_only_what_systems_and_users_said_is_kept(tmp_path: Path) -> None:
    """Each turn of a conversation stays: the target answers it itself."""
    contents = ["Be brief.", "One?", "Two?"]
    turns = [{"role": "system", "content": contents[0]}, {"role": "user", "content": contents[1]}]
    turns += [{"role": "assistant", "content": "An answer."}, {"role": "user", "content": contents[2]}]
    rows = [{"messages": turns}, {"instruction": "Do it.", "output": "An answer."}, {"prompt": "Do it."}, {"id": 7}]
    lines, report = written(tmp_path, rows)
    assert sorted([message["content"] for message in line["messages"]] for line in lines) == [contents, ["Do it."]]
    assert [line["id"] for line in lines] == sorted({line["id"] for line in lines})
    assert dict(+Counter(report["rows"])) == {"rows": 4, "duplicates": 1, "kept": 2}
    assert report["unusable rows"] == {
        'has no text as "prompt" and no turns as "messages", but "id"': f"1, first {tmp_path / 'source.jsonl'}:4"
    }


def test_what_the_assistant_said_does_not_matter(tmp_path: Path) -> None:
    answers = [None, "", "<|begin_of_thought|>Hm", [{"type": "reasoning"}]]
    asked = [{"role": "user", "content": "Why?"}]
    rows = [{"messages": [*asked, {"role": "assistant", "content": answer}]} for answer in answers]
    tool = [*asked, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    lines, report = written(tmp_path, [*rows, {"messages": tool}])
    assert [line["messages"] for line in lines] == [asked] and report["rows"]["duplicates"] == 3
    assert list(report["unusable rows"]) == ['has "tool_calls"']


def test_a_transcript_in_a_template_is_no_prompt(tmp_path: Path) -> None:
    """Another model's answer would be learned as what a user says."""
    text = "<|user|>Why?<|end|><|assistant|>So.<|end|>"
    lines, report = written(tmp_path, [{"text": text}, {"text": "Why?"}])
    assert [line["messages"][0]["content"] for line in lines] == ["Why?"]
    assert list(report["unusable rows"]) == ["is in a chat template already (<|user|>)"]
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
    wrote(monkeypatch, *texts, more=ends)
    lines, report = written(tmp_path, [], from_target=1)
    assert {line["source"] for line in lines} == {"target:1", "target:2", "target:4"}
    assert dict(+Counter(report["rows"])) == {
        "written by the target": 8,
        "not ended": 1,
        "with a special token": 1,
        "outside 15 to 600 characters": 2,
        "duplicates": 1,
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
    lines, report = written(tmp_path, [], from_target=1, apart_from=[str(measured)])
    usable = {text for text in PROMPTS[1:] if 15 <= len(text) <= 600}
    assert {line["messages"][0]["content"] for line in lines} == usable
    assert report["rows"]["near to a measured prompt"] > 80


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


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    """One that was cut off at the end is left out."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"a": 1}\n{"a": ')
    assert list(read_lines(file)) == [{"a": 1}]
    file.write_text('{"a": 1}\n{a: 1}\n')
    with pytest.raises(ToolError, match=f"^{file}:2: is no JSON .*; correct or remove that line$"):
        list(read_lines(file))
