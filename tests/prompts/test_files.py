"""The one reader of prompt files: what it takes, and what it refuses by line, reason and fix."""

import json
import os
import re
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.prompt_files import read_conversations, read_prompts

HI = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}
PARTS = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
SHARED = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}, {"from": "human", "value": "more"}]
ASKED = ["hi", "hello", "more"]


def chat(*turns: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(turns), **more}


ROWS = {
    "OpenAI": (chat(SYSTEM, HI, id=7), ["be brief", "hi"]),
    "no system prompt": (chat({"role": "system", "content": ""}, HI), ["hi"]),
    "developer": (chat({"role": "developer", "content": "be brief"}, HI), ["be brief", "hi"]),
    "parts": (chat({"role": "user", "content": PARTS}), ["a\nb\nc"]),
    "ShareGPT": ({"id": "x_1", "conversations": SHARED}, ASKED),
    "both": ({"prompt": "not this", **chat(HI)}, ["hi"]),
    "a list as prompt": ({"prompt": [HI]}, ["hi"]),
    "MT-Bench": ({"question_id": 81, "turns": ["one?", "two?"]}, ["one?"]),
    "run-batch": ({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": chat(HI)}, ["hi"]),
    "Alpaca": ({"instruction": "add", "input": "1, 1", "output": "2"}, ["add\n\n1, 1"]),
    "context that is no text": ({"instruction": "add", "context": ["a", "b"]}, ["add"]),
    "Nemotron": ({"input": [HI], "output": "hello"}, ["hi"]),
    "OpenOrca": ({"system_prompt": "be brief", "question": "hi", "response": "hello"}, ["be brief", "hi"]),
    "LLaMA-Factory": ({"conversations": SHARED[:2], "system": "be brief", "tools": "[]"}, ["be brief", "hi"]),
    "AIMO": ({"problem": "hi", "messages": None, "tools": []}, ["hi"]),
    "few shots": ({"prompt": "Q: 1 + 1?\nA: 2\nQ: 2 + 2?\nA:"}, ["Q: 1 + 1?\nA: 2\nQ: 2 + 2?\nA:"]),
}


def contents(file: Path) -> list[list[str]]:
    return [[message["content"] for message in messages] for messages in read_prompts(file)]


@pytest.mark.parametrize("name", ROWS)
def test_every_form_of_a_row(name: str, tmp_path: Path):
    row, expected = ROWS[name]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    assert contents(file) == [expected]


FILES = {
    "lines.jsonl": b'{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n',
    "bom.jsonl": b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}',
    "array.json": b'\n[{"prompt": "a"},\n {"prompt": "b"}]\n',
    "array": b'[\n {"prompt": "a"}, {"prompt": "b"}]',
    "no suffix": b"a\nb\n",
    "mixed.txt": b'a\n{"prompt": "b"}\n',
    "mac.txt": b"a\rb\r",
}


@pytest.mark.parametrize("name", FILES)
def test_every_form_of_a_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / name).write_bytes(FILES[name])
    assert contents(tmp_path / name) == [["a"], ["b"]]
    assert capsys.readouterr().err == ""


def test_a_pipe(tmp_path: Path):
    """`--prompts <(command)` of a shell: what is read once is gone."""
    os.mkfifo(tmp_path / "pipe")
    writer = Thread(target=(tmp_path / "pipe").write_text, args=('\n[{"prompt": "a"}]',))
    writer.start()
    assert contents(tmp_path / "pipe") == [["a"]]
    writer.join()


def test_other_line_ends_are_part_of_a_text(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a\u2028\n\nb\x0c\n", newline="")
    assert contents(tmp_path / "a.txt") == [["a\u2028"], ["b\x0c"]]


def test_turns_that_are_not_asked_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Whole conversations have them; the roles are those that chat templates know."""
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in (chat(HI), {"conversations": [*SHARED, SHARED[1]]})))
    assert [messages[-1] for messages in read_prompts(file)] == [HI, {"role": "user", "content": "more"}]
    assert "a.jsonl: 1 of 2 conversations are asked without their last turns" in capsys.readouterr().err
    assert [turn["role"] for turn in read_conversations(file)[1]] == ["user", "assistant"] * 2


CONTROL = "<|im_start|>"
IN_TEMPLATES = {
    "DeepSeek": "<\uff5cbegin\u2581of\u2581sentence\uff5c>hi",
    "Gemma": "<start_of_turn>user\nhi<end_of_turn>\n",
    "Gemma 4": "<|turn>user\nhi<turn|>\n",
    "Mistral": "<s>[INST] hi [/INST]",
    "Alpaca": "### Instruction:\nadd\n\n### Response:\n2",
    "Vicuna": "A chat. USER: hi ASSISTANT: hello</s>",
    "plain words": "User: hi\nAssistant: hello",
    "HH": "\n\nHuman: hi\n\nAssistant: hello",
}
REFUSED = {
    **{f"template of {name}": ({"text": text}, "in a chat template already (") for name, text in IN_TEMPLATES.items()},
    "a template in a turn": (chat({"role": "user", "content": CONTROL}), f"already ({CONTROL}); write its turns as"),
    "list": ([1], "is a list;"),
    "no key": ({"id": 7, "foo": "x"}, 'no text as "prompt" and no list of turns as "messages", but "id", "foo";'),
    "empty object": ({}, "but nothing;"),
    "empty prompt": ({"prompt": " \n"}, "a turn of the user that is empty;"),
    "list of texts": ({"prompt": ["a", "b"]}, "has a turn that is text;"),
    "messages of text": ({"messages": "hi"}, 'no list of turns as "messages", but "messages"; write one of them'),
    "turn without role": (chat({"content": "hi"}), "a turn with the role None; write system, user or assistant"),
    "empty parts": (chat({"role": "user", "content": []}), "whose content is an empty list;"),
    "null answer": (chat({"role": "assistant", "content": None}), "a turn of the assistant whose content is null;"),
    "image": (chat({"role": "user", "content": [{"type": "image_url"}]}), "that is 'image_url'; only text"),
    "image next to text": ({"prompt": "what is this?", "image": "a.png"}, 'has "image"; only text is taken'),
    "tool call": (chat({"role": "assistant", "content": None, "tool_calls": [{}]}), 'has "tool_calls"; only text'),
    "tool": (chat(HI, {"role": "tool", "content": "1"}), "the role 'tool'; write system"),
    "tools": (chat(HI, tools=[{"type": "function"}]), 'has "tools";'),
    "history": ({"instruction": "and?", "history": [["hi", "hello"]]}, 'has "history"; only text'),
    "no user": (chat(SYSTEM), "has no turn of a user; leave it out"),
    "half a character": ({"prompt": "\ud83d"}, "holds half a character"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_is_refused_by_line_and_reason(name: str, tmp_path: Path):
    row, reason = REFUSED[name]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "a good one"}) + "\n\n" + json.dumps(row))
    with pytest.raises(ToolError, match=rf"^{re.escape(str(file))}:3 .*{re.escape(reason)}") as refused:
        read_prompts(file)
    assert "\n" not in str(refused.value) and "; " in str(refused.value)


UNREADABLE = {
    "none.jsonl": (None, "cannot be read (No such file or directory)"),
    "empty.jsonl": (b"", "holds no prompt; write one a line"),
    "wide.jsonl": ('{"prompt": "a"}'.encode("utf-16"), "cannot be read (not UTF-8 text); write it as UTF-8"),
    "text.jsonl": (b"what is it?\n", ':1 is not valid JSON; write {"prompt": "..."} in one line, or name a file of'),
    "table.csv": (None, "is no prompt file (.jsonl, .ndjson, .json, .txt); make a .jsonl of it"),
    "brace.txt": (b'{"prompt": "a"}\n{\n', ':2 is not valid JSON; write {"prompt": "..."} in one line'),
    "array.json": (b'[{"prompt": "a"},\n{"prompt"}]', ":2 is not valid JSON (Expecting ':'"),
    "deep.jsonl": (b"[" * 200_000, " is not valid JSON"),
    "wrong.json": (b'[{"prompt": "a"}, 7]', ": entry 2 is a number;"),
    "columns.json": (b'{"data": [{"prompt": "a"}]}', ':1 has no text as "prompt" and no list of turns as "messages"'),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_cannot_be_read_is_one_line(name: str, tmp_path: Path):
    content, reason = UNREADABLE[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ToolError) as refused:
        read_prompts(tmp_path / name)
    line = str(refused.value)
    assert line.startswith(str(tmp_path / name)) and reason in line and "\n" not in line
