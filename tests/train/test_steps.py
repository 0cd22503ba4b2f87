"""Prompts; then answers, data and hidden states of a real target, by vLLM's server and speculators' commands.

One server, which writes hidden states as it answers, serves all tests of these, in the order of the file.
"""

import asyncio
import errno
import json
import shutil
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import pytest
import torch
from datasets import load_from_disk
from datasets.arrow_writer import ArrowWriter
from safetensors.torch import load_file, save, save_file
from speculators.train import dataloader

from peagle_tools.shared import processes
from peagle_tools.shared.errors import ToolError, TryAgain
from peagle_tools.shared.prompts import PROMPTS
from peagle_tools.train import collect_prompts, documents, memory_states, serve, steps
from peagle_tools.train.from_target import opening
from peagle_tools.train.lines import read_lines, write_lines
from peagle_tools.train.peagle_yaml import STAMP, Config, Data, HeadSettings, Step, read_config
from tests.support.command import run
from tests.support.models import TARGET, heldout
from tests.support.serving import NOT_FOR_SERVERS, free_port
from tests.train.runs import ENGINE, toy_run


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
    reason = 'has no text as "prompt" and no list of turns as "messages", but "id"'
    assert report["unusable rows"] == {reason: f"1, first {tmp_path / 'source.jsonl'}:4"}


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
    dropped = {"not ended": 1, "with a special token": 1, "outside 15 to 600 characters": 2, "duplicates": 1}
    assert dict(+Counter(report["rows"])) == {"written by the target": 8, **dropped, "kept": 3}


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
    file.write_text('{"a": 1}\n\n{"a": ')
    assert list(read_lines(file, needs="a")) == [{"a": 1}]
    for line, missing in (('{"a": 1}', "b"), ('["a", "b"]', "a, b"), ("7", "a, b")):
        file.write_text(line + "\n")
        with pytest.raises(ToolError, match=f"^{file}:1: has no {missing}; correct or remove that line$"):
            list(read_lines(file, needs="ab"))
    file.write_text('{"a": 1}\n{a: 1}\n')
    with pytest.raises(ToolError, match=f"^{file}:2: is no JSON .*; correct or remove that line$"):
        list(read_lines(file))


NUM_PROMPTS, HELD_OUT = 10, 4
MAX_TOKENS, LAYERS = 20, [2, 5, 7]
TOO_LONG = "def f(x):\n    return x\n" * 60  # more tokens than the server's max_model_len


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    """A run with prompts, of which the target can read all but the last, and a server that writes hidden states."""
    folder = tmp_path_factory.mktemp("run")
    texts = [*heldout()[:NUM_PROMPTS], TOO_LONG]
    rows = [{"id": f"{n:02}", "messages": [{"role": "user", "content": text}]} for n, text in enumerate(texts)]
    rows[1]["messages"].append({"role": "user", "content": "And now?"})
    write_lines(folder / "prompts.jsonl", rows)
    parts = {"head": HeadSettings(aux_layers=LAYERS), "step": Step(tokens=256, dtype="float32"), "engine": ENGINE}
    data = Data(held_out=HELD_OUT, max_tokens=MAX_TOKENS)
    config = Config(target=str(TARGET), folder=str(folder), data=data, **parts)
    with pytest.MonkeyPatch.context() as patch:
        for name in NOT_FOR_SERVERS:
            patch.delenv(name, raising=False)
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process less that imports vLLM
        with serve.running(config, folder / "logs/server.log", hidden_states=True) as (endpoint, _):
            patch.setattr(serve, "running", lambda config, *_, **__: nullcontext((config.data.endpoint, None)))
            yield changed(config, "data", endpoint=endpoint)


def answers_of(config: Config) -> Path:
    return config.run / "answers.jsonl"


def rows(config: Config) -> list[dict[str, Any]]:
    return list(read_lines(answers_of(config)))


def changed(config: Config, part: str, **fields: Any) -> Config:
    return config.model_copy(update={part: getattr(config, part).model_copy(update=fields)})


@pytest.fixture(scope="module")
def target() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


def test_answers_are_the_targets_own(config: Config, target: Any) -> None:
    """Greedy, in the server's chat template, supervised where the target spoke; what it refused is counted.

    One ends where it says four tokens or more three times in a row.

    A run that was killed while it wrote left one whole answer, a second one of which more may be missing, and half a
    line: only the first one is kept.
    """
    left = {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "text": "", "finish_reason": "stop"}
    write_lines(answers_of(config), [{"id": f"{key}_gen0", "primary_id": key, **left} for key in ("00", "01")])
    with answers_of(config).open("a") as file:
        file.write('{"id": "02_gen0", "primary')
    assert "1 prompts refused" in steps.answers(config)
    assert [row["primary_id"] for row in rows(config)] == [f"{number:02}" for number in range(NUM_PROMPTS)]
    assert rows(config)[0]["input_ids"] == left["input_ids"]
    for row in rows(config)[1:4]:
        start = row["loss_mask"].index(1)
        assert row["loss_mask"] == [0] * start + [1] * (len(row["input_ids"]) - start)
        logits = target(torch.tensor([row["input_ids"]])).logits[0, start - 1 : -1]
        assert logits.argmax(-1).tolist() == row["input_ids"][start:]
    looping = rows(config)[6]
    answer = looping["input_ids"][looping["loss_mask"].index(1) :]
    assert looping["finish_reason"] == "repetition" and answer[-12:] == answer[-4:] * 3 and len(answer) < MAX_TOKENS


def test_the_target_writes_prompts_itself(config: Config, tmp_path: Path) -> None:
    """By the command, which continues where it was killed."""
    file, folder = tmp_path / "peagle.yaml", tmp_path / "run"
    out, sampled = folder / "prompts.jsonl", folder / "prompts.sampled.jsonl"

    def write(number: int, **more: Any) -> Any:
        data = {"endpoint": config.data.endpoint, "from_target": number, **more}
        file.write_text(json.dumps({"target": str(TARGET), "data": data}))
        return run("train", "prompts", file)

    def wrote(number: int) -> list[dict[str, Any]]:
        ended = write(number)
        assert ended.exit_code == 0, ended.output
        return list(read_lines(out))

    few = wrote(32)  # of which a fifth is usable
    first = {row["number"]: row for row in read_lines(sampled)}
    assert sorted(first) == list(range(32)) and {row["after"] for row in first.values()} == {"<|bos|><|user|>"}
    assert len({row["text"] for row in first.values()}) > 6
    with sampled.open("a") as lines:
        lines.write('{"number": 32, "af')
    many = wrote(40)
    rows = {row["number"]: row for row in read_lines(sampled)}
    assert sorted(rows) == list(range(40)) and {n: rows[n] for n in first} == first
    assert {line["id"] for line in few} <= {line["id"] for line in many}
    ended = write(41, endpoint=f"http://127.0.0.1:{free_port()}/v1")  # where no server is
    assert ended.exit_code == 75 and "gives no prompts ([Errno 111] Connection refused)" in ended.stderr
    ended = write(41, sampling={"temperature": -1})
    assert ended.exit_code == 2 and "gives no prompts (Error code: 400" in ended.stderr
    write_lines(sampled, [rows[0] | {"after": "<s>"}])
    ended = write(40)
    assert ended.exit_code == 2 and "was sampled from another target; remove it" in ended.stderr


def test_what_speculators_leaves_out_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A greedy answer without a token, which a second try would not change, as one by a server without the model.

    Data are made of finished answers only.
    """
    reasons = ["InvalidResponseError('HTTP 404 from http')", "ValueError('empty assistant generation (sample 0)')"]
    data = Data(held_out=1, endpoint="http://localhost:1/v1", concurrency=7)
    config = Config(target=str(TARGET), folder=str(tmp_path), data=data)
    row = {"input_ids": [1, 2], "loss_mask": [0, 1], "text": "", "metadata": {"finish_reason": "length"}}

    def answer(words: list[str], *_: object) -> None:
        assert words[words.index("--concurrency") + 1] == "7"
        assert '"repetition_penalty": 1,' in words[words.index("--sampling-params") + 1]
        write_lines(answers_of(config), [row | {"primary_id": key[0], "id": key} for key in ("a0", "a1", "b0", "c0")])
        error = {"id": "d", "metadata": {"error": reasons.pop(0)}}
        write_lines(tmp_path / "answers.errors.jsonl", [error])
        with pytest.raises(ToolError, match="is not finished; `peagle-vllm train answers`"):
            steps.data(config)

    turns = [{"role": "user", "content": "One?"}, {"role": "user", "content": "Two?"}]
    write_lines(tmp_path / "prompts.jsonl", ({"id": key, "messages": turns} for key in "abcd"))
    monkeypatch.setattr(steps, "speculators", answer)
    with pytest.raises(ToolError, match=r"1 of 4 prompts have no answer yet \(Inv.*404 from.*; correct data.endpoint"):
        steps.answers(config)
    report = steps.answers(config)
    assert "4 answers to 3 prompts, 4 of them ended by max_tokens" in report
    assert report.endswith("; 1 prompts refused or answered with nothing, see answers.errors.jsonl")
    with pytest.raises(ToolError, match=r"no documents .* `peagle-vllm train pipeline` makes them"):
        steps.states(config)


def test_what_is_changed_of_speculators(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that ended while the target reasoned is one, and a file may be written as slowly as the disk is.

    A worker that fails, as both do on a full disk, ends the command.
    """
    from peagle_tools.train import library

    how = {"conv_id": "a", "sample_index": 0, "idx": 0, "endpoint": "", "sampling_params": {}, "detokenize": str}
    message = {"content": None, "reasoning": "Let me see"}
    reply = {"prompt_token_ids": [1], "choices": [{"message": message, "token_ids": [2], "finish_reason": "length"}]}
    client, answering, ran = library.vllm_client, library.answering, []
    monkeypatch.setattr(client.wait_for_lock_async, "__defaults__", (10.0, 0.1))
    monkeypatch.setattr(answering, "_sample_from_response", library.sample_of)
    for module in answering, library.offline:
        monkeypatch.setattr(module, "_worker", AsyncMock(side_effect=OSError("disk")))
    monkeypatch.setattr(library.os, "_exit", ran.append)
    monkeypatch.setattr(library, "app", lambda: ran.append(client.wait_for_lock_async.__defaults__))
    with pytest.raises(ValueError, match="empty assistant generation"):
        answering._sample_from_response(reply, **how)
    library.main()
    sample, said, _ = answering._sample_from_response(reply, **how)
    for module in answering, library.offline:
        asyncio.run(module._worker())
    assert (sample["input_ids"], said["content"], ran) == ([1, 2], " ", [(3600, 0.1), 1, 1])


def test_nothing_is_learned_of_held_out_conversations(tmp_path: Path) -> None:
    config = Config(target=str(TARGET), folder=str(tmp_path), data=Data(held_out=1))
    answers = [("a", [1, 2]), ("a", [1, 2, 3]), ("b", [4, 5]), ("d", [1, 2])]  # that of "d" begins as that of "a"
    rows = [{"primary_id": key, "input_ids": ids, "loss_mask": [0] * len(ids)} for key, ids in answers]
    write_lines(answers_of(config), rows[:2])
    with pytest.raises(ToolError, match="2 answers are too few: 1 are held out; add prompts"):
        steps.data(config)
    config.data_folder.mkdir()  # somebody's own
    with pytest.raises(ToolError, match="data is there and no data of speculators; name another folder"):
        steps.data(config)
    config.data_folder.rmdir()
    full = {"primary_id": "c", "input_ids": [6, 7, 8], "loss_mask": [0, 1, 1], "finish_reason": "length"}
    write_lines(answers_of(config), [full, *rows])  # the context ended it, and vLLM takes no prompt as long
    full_disk = patch.object(ArrowWriter, "write", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with full_disk, pytest.raises(ToolError, match=r"data cannot be written \(No space left on device\); nothing is"):
        steps.data(config)
    assert "2 documents, 4 tokens, the longest 2, 1 held out; 3 more of held-out" in steps.data(config)
    assert load_from_disk(str(config.data_folder)).with_format(None)["input_ids"] == [[4, 5], [1, 2]]


def test_answers_to_prompts_that_are_gone_are_refused(tmp_path: Path) -> None:
    config = Config(target=str(TARGET), folder=str(tmp_path), data=Data(held_out=1))
    write_lines(tmp_path / "prompts.jsonl", [{"id": key, "messages": []} for key in "ab"])
    write_lines(answers_of(config), [{"primary_id": key, "id": key} for key in "bc"])
    with pytest.raises(ToolError, match=r"answers.jsonl: 1 of its prompts are not in .*prompts.jsonl; remove it, or"):
        steps.answers(config)


def test_documents_longer_than_a_step_are_refused(config: Config) -> None:
    """The last documents are those of the first prompts."""
    steps.data(config)
    documents = [row["input_ids"] for row in load_from_disk(str(config.data_folder)).with_format(None)]
    answered = [row["input_ids"] for row in rows(config)]
    assert documents == answered[HELD_OUT:] + answered[:HELD_OUT]
    longest = max(map(len, documents))
    with pytest.raises(ToolError, match=f"1 of {NUM_PROMPTS} documents .* the longest {longest}: raise step.tokens$"):
        steps.states(changed(config, "step", tokens=longest - 1))


def test_hidden_states_are_the_targets(config: Config, target: Any, capsys: Any) -> None:
    """Those that enter the layers of the head, and what leaves the last one, before its norm.

    Of the files that are there a whole one is kept; one that is cut off, and one of another document, are not.
    """
    folder = config.data_folder / "hidden_states"
    folder.mkdir()
    ids = load_from_disk(str(config.data_folder))["input_ids"]
    zeros = [{"token_ids": tokens, "hidden_states": torch.zeros(len(tokens), 4, 128)} for tokens in ids]
    save_file(zeros[0], folder / "hs_0.safetensors")
    (folder / "hs_1.safetensors").write_bytes(save(zeros[1])[:-7])
    save_file(zeros[3], folder / "hs_2.safetensors")
    last: list[torch.Tensor] = []
    target.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
    assert "those of 1 were there" in steps.states(config)
    tokens = sum(len(row["input_ids"]) for row in rows(config)) - len(ids[0])
    assert f"hidden states: {tokens * 4 * 128 * 4 / 1e9:.3f} GB; " in capsys.readouterr().out
    assert json.loads((config.data_folder / STAMP).read_text()) == config.stamp
    assert not load_file(folder / "hs_0.safetensors")["hidden_states"].any()
    for number in range(1, NUM_PROMPTS):
        stored = load_file(folder / f"hs_{number}.safetensors")["hidden_states"]
        states = target(ids[number][None], output_hidden_states=True).hidden_states
        expected = torch.stack([*(states[layer][0] for layer in LAYERS), last[-1][0]], dim=1)
        torch.testing.assert_close(stored, expected, rtol=1e-3, atol=1e-3)


def test_documents_in_memory_are_those_of_files(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where several forwards compute them. A second run has them from the first; then their memory is free."""
    monkeypatch.setattr(memory_states, "MOST_TOKENS", 300)
    options = {"max_len": 512, "datapath": config.data_folder, "train_ratio": 0.5, "split": "val", "transfer": None}
    options |= {"hidden_states_dtype": torch.float32}
    stored, runs = documents.SupervisedRows(**options), []
    in_memory, rows = changed(config, "data", states="memory"), documents.read_rows(config)
    for _ in range(2):
        documents.take_states(in_memory, rows)
        runs.append(dataloader.ArrowDataset(**options))
    assert len(stored) == len(runs[0]) > 1 and runs[0].transfer is runs[1].transfer
    for of_file, of_memory in zip(stored, runs[1], strict=True):
        torch.testing.assert_close(of_memory, of_file, rtol=1e-3, atol=1e-3)
    states = weakref.ref(runs.pop().transfer)
    runs.clear()
    documents.free_states()
    assert states() is None
    monkeypatch.setattr(memory_states, "psutil", Mock(**{"virtual_memory.return_value.available": 100}))
    with pytest.raises(ToolError, match=r"^data.states: memory: .* more than half of the 0\.0 GB that are free; write"):
        documents.take_states(in_memory, rows)
    monkeypatch.setattr(memory_states.AutoModelForCausalLM, "from_pretrained", Mock(side_effect=ValueError("no\nway")))
    with pytest.raises(ToolError, match=r"cannot compute .* of .*tiny-llama \(no.*\); write `states: files`$"):
        documents.take_states(in_memory, rows)


def test_without_its_server_a_step_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what speculators says then."""
    start, fails = processes.start, [sys.executable, "-c", "raise SystemExit('APIConnectionError: Connection error.')"]
    monkeypatch.setattr(processes, "start", lambda _, **options: start(fails, **options))
    with pytest.raises(TryAgain, match=r"answers failed .*Connection error"):
        steps.speculators(["answers"], tmp_path / "log")


def test_too_small_a_disk_is_said_beforehand(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    (config.data_folder / "hidden_states/hs_0.safetensors").unlink()
    free = shutil._ntuple_diskusage(10, 10, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(ToolError, match="not enough room"):
        steps.states(config)


def test_requests_that_failed_can_be_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """speculators leaves out what failed, and ends well."""
    config = read_config(toy_run(tmp_path / "run", data={"concurrency": 512}))
    folder, asked = config.data_folder / "hidden_states", []
    folder.joinpath("hs_9.safetensors").rename(tmp_path / "hs_9.safetensors")
    monkeypatch.setattr(serve, "running", lambda *_, **__: nullcontext(("http://there", None)))
    monkeypatch.setattr(steps, "speculators", lambda words, *_: asked.extend(words))
    with pytest.raises(TryAgain, match=r"1 of 24 .* row 9 is the first; its log: .*the same command"):
        steps.states(config)
    assert asked[asked.index("--concurrency") + 1] == str(steps.MOST_STATES)
    monkeypatch.setattr(steps, "speculators", lambda *_: shutil.copy(tmp_path / "hs_9.safetensors", folder))
    assert steps.states(config) == "hidden states of 24 documents; those of 23 were there"
