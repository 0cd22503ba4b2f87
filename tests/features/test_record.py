"""Recording of prompts while serving: what is written, how, and what never is."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peagle_tools.shared import server
from peagle_tools.shared.errors import ToolError
from peagle_tools.sharpen import prompts
from peagle_vllm.patches import record
from tests.support.engines import Request, Settings, engine
from tests.support.random_heads import HeadSpec, prompt, write_pair

REQUESTS = [Request("a", prompt(9), 10), Request("b", prompt(20, 1), 1), Request("gone", prompt(12, 2), 10, aborted=0)]
POLICY = (("scheduling_policy", "priority"),)  # changes nothing here; a second engine


def lines(file: Path) -> list[list[int]]:
    return [json.loads(line)["prompt"] for line in file.read_text().splitlines()]


def mode(file: Path) -> int:
    return file.stat().st_mode & 0o777


@pytest.mark.arm("plugin-v1", "plugin-v2")
def test_an_engine_records_where_it_is_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned):
    settings = Settings(*write_pair(tmp_path, HeadSpec()), k=3, max_model_len=96)
    assert "_free_request" not in vars(engine(settings).scheduler)  # vLLM's own
    folder = tmp_path / "new" / "records"
    monkeypatch.setenv(record.RECORD, str(folder))
    live = engine(replace(settings, llm=POLICY))
    assert len(warned(f"your users' text, in {folder}/0.jsonl")) == 1
    plain = live.run(REQUESTS)
    assert sorted(lines(folder / "0.jsonl")) == sorted([*map(list, (prompt(9), prompt(20, 1)))])
    assert (mode(folder), mode(folder / "0.jsonl")) == (0o700, 0o600)
    (folder / "0.jsonl").unlink()
    folder.rmdir()
    for _ in range(2):  # the disk fails: text goes on
        again = live.run(REQUESTS)
        assert [done.output for done in again.values()] == [done.output for done in plain.values()]
    assert len(warned("P-EAGLE records no more prompts")) == 1
    assert not folder.exists()


def request(ids: list[int], **changes: Any) -> Any:
    """A finished ``Request``, as far as recording reads it."""
    fields = {"prompt_token_ids": ids, "num_output_tokens": 4, "mm_features": [], "prompt_embeds": None}
    return SimpleNamespace(**{**fields, "lora_request": None, **changes})


@pytest.mark.parametrize(
    "change", [{"num_output_tokens": 0}, {"mm_features": [1]}, {"prompt_embeds": 1}, {"lora_request": 1}]
)
def test_what_is_not_all_text_of_the_target_is_left_out(change: dict[str, Any], tmp_path: Path):
    records = record.Records(tmp_path, 0)
    for each in (request([1], **change), request([2, 3])):
        records.add(each)
    assert lines(tmp_path / "0.jsonl") == [[2, 3]]


def test_size_is_bounded_and_the_oldest_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(record, "FILE_BYTES", 60)
    records, other = record.Records(tmp_path, 0), record.Records(tmp_path, 1)
    for number in range(100, 120):
        records.add(request([number]))  # 17 bytes
    other.add(request([7]))  # of another data parallel rank
    assert lines(tmp_path / "0.older.jsonl") == [[115], [116], [117]]
    assert lines(tmp_path / "0.jsonl") == [[118], [119]]
    assert lines(tmp_path / "1.jsonl") == [[7]]
    assert {mode(file) for file in tmp_path.iterdir()} == {0o600}


def test_half_a_line_stays_the_last_one_until_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "0.jsonl"
    records, write = record.Records(tmp_path, 0), os.write
    records.add(request([1, 2]))
    with monkeypatch.context() as short:
        short.setattr(record.os, "write", lambda to, line: write(to, line[:-3]))  # the disk is full
        records.add(request([3, 4]))
    records.add(request([5, 6]))
    assert file.read_text() == '{"prompt":[1,2]}\n{"prompt":[3,4'
    assert prompts.read_records(tmp_path, 10, 100) == ([[1, 2]], 1)
    file.chmod(0o644)
    record.Records(tmp_path, 0).add(request([5, 6]))
    assert lines(file) == [[1, 2], [5, 6]]
    assert mode(file) == 0o600


def test_a_server_of_the_tools_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(record.RECORD, str(tmp_path / "records"))
    said = f"import os; print('records:', os.environ.get('{record.RECORD}'))"
    monkeypatch.setattr(server, "COMMAND", [sys.executable, "-c", said])
    with server.Server([], None, cwd=tmp_path, env={}, log=tmp_path / "log") as started:
        started.process.wait()
    assert (tmp_path / "log").read_text().strip() == "records:"


def test_records_are_read_once_each_and_of_a_chat_its_last_prompt(tmp_path: Path):
    with pytest.raises(ToolError, match="holds no recorded prompt; serve with PEAGLE_VLLM_RECORD="):
        prompts.read_records(tmp_path, 10, 6)
    of_files = {"0.older.jsonl": [[1, 2], [4]], "0.jsonl": [[1, 2, 3, 5], [4], [1, 2, 3]], "1.jsonl": [[9] * 7, [4, 0]]}
    for name, found in of_files.items():
        (tmp_path / name).write_text("".join(json.dumps({"prompt": ids}) + "\n" for ids in found))
    read, number = prompts.read_records(tmp_path, 10, 6)
    assert (sorted(read), number) == ([[1, 2, 3, 5], [4, 0]], 6)
    with pytest.raises(ToolError, match="every recorded prompt is longer than 0 tokens; raise max_model_len"):
        prompts.read_records(tmp_path, 10, 0)


@pytest.mark.parametrize(
    "line", ["{", '{"prompt": []}', '{"prompt": [10]}', '{"prompt": [-1]}', "[1]", '{"prompt": 1}']
)
def test_any_other_broken_line_is_named(line: str, tmp_path: Path):
    (tmp_path / "0.jsonl").write_text(f'{{"prompt": [1]}}\n{line}\n{{"prompt": [2]}}\n')
    with pytest.raises(ToolError, match=r"0\.jsonl:2 is no recorded prompt of this target; remove"):
        prompts.read_records(tmp_path, 10, 100)
