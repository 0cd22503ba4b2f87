"""Answers, data and hidden states of a real target, through vLLM's server and speculators' commands.

One server, which writes hidden states as it answers, serves all tests, in the order of the file.
"""

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from datasets import load_from_disk
from safetensors.torch import load_file, save, save_file
from typer.testing import CliRunner

from peagle_tools.cli import app
from peagle_tools.shared.errors import ToolError, TryAgain
from peagle_tools.shared.server import Server, ServerFailed
from peagle_tools.train import serve, steps
from peagle_tools.train.lines import read_lines, write_lines
from peagle_tools.train.peagle_yaml import STAMP, Config, Data, Every, HeadSettings, Optimizer, Step, read_config
from peagle_tools.train.training import train
from tests.support.models import TARGET, heldout
from tests.support.serving import NOT_FOR_SERVERS, free_port
from tests.train.runs import ENGINE, toy_run

PROMPTS, HELD_OUT = 10, 4
MAX_TOKENS, LAYERS = 20, [2, 5, 7]
TOO_LONG = "def f(x):\n    return x\n" * 60  # more tokens than the server's max_model_len


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    """A run with prompts, of which the target can read all but the last, and a server that writes hidden states."""
    folder = tmp_path_factory.mktemp("run")
    texts = [*heldout()[:PROMPTS], TOO_LONG]
    rows = [{"id": f"{n:02}", "messages": [{"role": "user", "content": text}]} for n, text in enumerate(texts)]
    rows[1]["messages"].append({"role": "user", "content": "And now?"})
    write_lines(folder / "prompts.jsonl", rows)
    endpoint = f"http://127.0.0.1:{free_port()}/v1"
    config = Config(
        target=str(TARGET),
        folder=str(folder),
        data=Data(held_out=HELD_OUT, max_tokens=MAX_TOKENS, serve=False, endpoint=endpoint),
        head=HeadSettings(aux_layers=LAYERS),
        step=Step(tokens=256, dtype="float32"),
        engine=ENGINE,
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in NOT_FOR_SERVERS:
            patch.delenv(name, raising=False)
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process less that imports vLLM
        with serve.running(changed(config, "data", serve=True), folder / "logs/server.log", hidden_states=True):
            yield config


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
    left = {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "text": "", "finish_reason": "stop", "temperature": 0}
    write_lines(answers_of(config), [{"id": f"{key}_gen0", "primary_id": key, **left} for key in ("00", "01")])
    with answers_of(config).open("a") as file:
        file.write('{"id": "02_gen0", "primary')
    assert "1 prompts refused" in steps.answers(config)
    assert [row["primary_id"] for row in rows(config)] == [f"{number:02}" for number in range(PROMPTS)]
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
    file, run = tmp_path / "peagle.yaml", tmp_path / "run"
    out, sampled = run / "prompts.jsonl", run / "prompts.sampled.jsonl"

    def write(number: int, **more: Any) -> Any:
        data = {"endpoint": config.data.endpoint, "serve": False, "pii": "none", "from_target": number, **more}
        file.write_text(json.dumps({"target": str(TARGET), "data": data}))
        return CliRunner().invoke(app, ["train", "prompts", str(file)])

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
    """A greedy answer without a token, which a second try would not change, and turns after max_tokens tokens in all.

    Data are made of finished answers only.
    """
    config = Config(target=str(TARGET), folder=str(tmp_path), data=Data(held_out=1, serve=False, concurrency=7))
    row = {"input_ids": [1, 2], "loss_mask": [0, 1], "text": ""}
    row["metadata"] = {"sampling_params": {"temperature": 0}, "finish_reason": "length"}

    def answer(words: list[str], *_: object) -> None:
        assert words[words.index("--concurrency") + 1] == "7"
        write_lines(answers_of(config), [row | {"primary_id": key[0], "id": key} for key in ("a0", "a1", "b0", "c0")])
        error = {"id": "d", "metadata": {"error": "ValueError('empty assistant generation (sample 0)')"}}
        write_lines(tmp_path / "answers.errors.jsonl", [error])
        with pytest.raises(ToolError, match="is not finished; `peagle-vllm train answers`"):
            steps.data(config)

    turns = [{"role": "user", "content": "One?"}, {"role": "user", "content": "Two?"}]
    write_lines(tmp_path / "prompts.jsonl", ({"id": key, "messages": turns} for key in "abcd"))
    monkeypatch.setattr(steps, "speculators", answer)
    report = steps.answers(config)
    assert "4 answers to 3 prompts, 4 of them ended by max_tokens" in report
    assert ", 2 later turns not asked, after more than max_tokens in all; 1 prompts refused or answered with" in report
    assert report.endswith("nothing, see answers.errors.jsonl")
    with pytest.raises(ToolError, match=r"no documents .* `peagle-vllm train pipeline` makes them"):
        steps.states(config)


def test_held_out_answers_are_greedy(tmp_path: Path) -> None:
    """Where the first prompt was refused greedily and answered at the temperature, the next one is held out."""
    config = Config(target=str(TARGET), folder=str(tmp_path), data=Data(held_out=2, temperature=1))
    row = {"loss_mask": [0, 1], "text": "", "finish_reason": "stop"}
    answers = [(1, [1, 2], 1), (2, [3, 4], 0), (3, [5, 6], 1)]
    rows = [row | {"primary_id": key, "input_ids": ids, "temperature": t} for key, ids, t in answers]
    write_lines(answers_of(config), rows)
    with pytest.raises(ToolError, match="3 answers, 1 of them greedy, are too few: 2 greedy ones are held out"):
        steps.data(config)
    config = changed(config, "data", held_out=1)
    assert "3 documents, 6 tokens, the longest 2, 1 held out" in steps.data(config)
    assert load_from_disk(str(config.data_folder)).with_format(None)["input_ids"][-1] == [3, 4]


def test_documents_longer_than_a_step_are_refused(config: Config) -> None:
    """The last documents are those of the first prompts, answered greedily."""
    longest = max(len(row["input_ids"]) for row in rows(config))
    with pytest.raises(ToolError, match=f"1 of {PROMPTS} documents .* the longest {longest}: raise step.tokens$"):
        steps.data(changed(config, "step", tokens=longest - 1))
    assert not config.data_folder.exists()
    steps.data(config)
    documents = [row["input_ids"] for row in load_from_disk(str(config.data_folder)).with_format(None)]
    answered = [row["input_ids"] for row in rows(config)]
    assert sorted(documents[-HELD_OUT:]) == sorted(answered[:HELD_OUT])
    assert sorted(documents[:-HELD_OUT]) == sorted(answered[HELD_OUT:])


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
    tokens = sum(len(row["input_ids"]) for row in rows(config))
    assert f"{tokens:,} tokens x 4 layers x 128 x 4 bytes" in capsys.readouterr().out
    assert json.loads((config.data_folder / STAMP).read_text()) == config.stamp
    assert not load_file(folder / "hs_0.safetensors")["hidden_states"].any()
    for number in range(1, PROMPTS):
        stored = load_file(folder / f"hs_{number}.safetensors")["hidden_states"]
        states = target(ids[number][None], output_hidden_states=True).hidden_states
        expected = torch.stack([*(states[layer][0] for layer in LAYERS), last[-1][0]], dim=1)
        torch.testing.assert_close(stored, expected, rtol=1e-3, atol=1e-3)


def test_a_server_of_ones_own_has_the_variables_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the line that is shown, which is to be run on another machine, has them, too."""
    file, became = tmp_path / "peagle.yaml", []
    file.write_text(f"target: {TARGET}\ndata: {{serve: false, endpoint: 'http://there:81/v1'}}\n")
    monkeypatch.setattr("os.execve", lambda *process: became.append(process))
    for name in serve.ENVIRONMENT | serve.ON_CPU:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-15|16-31")
    shown = CliRunner().invoke(app, ["train", "serve-target", str(file)]).stderr
    [(_, command, environment)] = became
    assert environment.items() >= serve.environment().items()
    assert shlex.split(shown) == [*(f"{name}={value}" for name, value in serve.environment().items()), *command]
    assert "VLLM_CPU_OMP_THREADS_BIND='0-15|16-31' " in shown and "--host there --port 81" in shown


def test_without_its_server_a_step_can_be_tried_again(config: Config) -> None:
    """No server listens at this port; what is there stays."""
    elsewhere = changed(config, "data", endpoint=f"http://127.0.0.1:{free_port()}/v1")
    (config.data_folder / "hidden_states/hs_0.safetensors").unlink()
    with pytest.raises(TryAgain, match="Connection error"):
        steps.states(elsewhere)


def test_too_small_a_disk_is_said_beforehand(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil._ntuple_diskusage(10, 10, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(ToolError, match="not enough room"):
        steps.states(config)


def test_online_it_trains_the_same_head(config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From the server's hidden states as from files: loss of every step, AL by replay, and weights."""
    steps.states(config)  # a test before this one took a file away
    short = {"head": HeadSettings(layers=2, depths=3, aux_layers=LAYERS), "optimizer": Optimizer(steps=4, lr=0.01)}
    short |= {"every": Every(checkpoint=4, replay=4), "speculators": {"num_workers": 0, "log_freq": 1}}
    from_files = config.model_copy(update=short)
    online = changed(from_files, "data", online=True).model_copy(update={"folder": str(tmp_path)})
    shutil.copytree(config.data_folder, online.data_folder, ignore=shutil.ignore_patterns("hidden_states"))
    results = []
    for settings in (from_files, online):
        train(settings)
        log = list(read_lines(settings.run / "log.jsonl"))
        losses = [(line["loss"], line["accuracy"]) for line in log if "loss" in line]
        weights = (settings.run / "checkpoints/step-4/master.safetensors").read_bytes()
        results.append((losses, log[-1]["held_out"], (settings.run / "al.jsonl").read_text(), weights))
    losses = results[0][0]
    assert len(losses) == 4 and losses[3] < losses[0]
    assert results[1] == results[0]
    assert not (online.data_folder / "hidden_states").exists()
    told = [record.msg["al"] for record in caplog.records if "al" in record.msg]  # to TensorBoard and others
    assert [set(lengths) for lengths in told] == [{"K=1", "K=2", "K=3"}] * 2


def test_requests_that_failed_can_be_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine's server: the command leaves out what failed, ends well, and has the reason in its log."""
    config = read_config(toy_run(tmp_path / "run", data={"serve": False, "concurrency": 7}))
    folder = config.data_folder / "hidden_states"
    folder.joinpath("hs_9.safetensors").rename(tmp_path / "hs_9.safetensors")

    def generate(words: list[str], log: Path, server: Server | None = None) -> None:
        assert words[words.index("--concurrency") + 1] == "7"
        log.parent.mkdir(exist_ok=True)
        log.write_text("Skipping sample 9 due to error:   offline.py:179\n")

    monkeypatch.setattr(steps, "speculators", generate)
    with pytest.raises(TryAgain, match=r"1 of 24 .* row 9 is the first \(no answer in time; .*the same command"):
        steps.states(config)
    monkeypatch.setattr(steps, "speculators", lambda *_: shutil.copy(tmp_path / "hs_9.safetensors", folder))
    assert steps.states(config) == "hidden states of 24 documents; those of 23 were there"


def test_an_endpoint_without_a_port_is_port_80(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    server = Mock(side_effect=ServerFailed("stopped"))
    monkeypatch.setattr(serve, "Server", server)
    config = Config(target=str(TARGET), folder=str(tmp_path), data=Data(endpoint="http://localhost/v1"))
    with pytest.raises(ToolError, match="stopped"), serve.running(config, tmp_path / "server.log"):
        pass
    assert server.call_args.args[1] == 80
