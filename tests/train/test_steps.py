"""Answers, data and hidden states of a real target, through vLLM's server and speculators' commands.

One server, which writes hidden states beside its answers, serves all tests, in the order of the file.
"""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peagle_vllm.bench.server import Server
from peagle_vllm.train import TrainError, TryAgain, serve, steps
from peagle_vllm.train.config import STAMP, Config, Data, Head, Step
from tests.models import MODELS, TARGET
from tests.serving import NOT_FOR_SERVERS, free_port

HELD_OUT, PROMPTS, MAX_TOKENS, LAYERS = 4, 10, 16, [2, 5, 7]
TOO_LONG = "def f(x):\n    return x\n" * 60  # more tokens than the server's max_model_len


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run whose server is the test's, with its prompts, of which the target can read all but the last."""
    folder = tmp_path_factory.mktemp("run")
    texts = [json.loads(line)["prompt"] for line in (MODELS / "prompts/heldout.jsonl").read_text().splitlines()]
    rows = [
        {"id": f"{n:02}", "messages": [{"role": "user", "content": text}]} for n, text in enumerate(texts[:PROMPTS])
    ]
    rows[1]["messages"].append({"role": "user", "content": texts[PROMPTS]})
    rows.append({"id": "99", "messages": [{"role": "user", "content": TOO_LONG}]})
    steps.write_lines(folder / "prompts.jsonl", rows)
    return Config(
        target=str(TARGET),
        folder=str(folder),
        data=Data(
            held_out=HELD_OUT,
            max_tokens=MAX_TOKENS,
            endpoint=f"http://127.0.0.1:{free_port()}/v1",
            serve=False,
        ),
        head=Head(aux_layers=LAYERS),
        step=Step(tokens=256, dtype="float32"),
        engine={"max_model_len": 512, "max_num_seqs": 16, "enforce_eager": True, "kv_cache_memory_bytes": 256 << 20},
    )


@pytest.fixture(scope="module")
def server(config: Config) -> Iterator[Server]:
    serving = config.model_copy(update={"data": config.data.model_copy(update={"serve": True})})
    states = config.run / "states"
    states.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name in NOT_FOR_SERVERS:
            patch.delenv(name, raising=False)
        with serve.running(serving, serve.arguments(serving, states), config.run / "logs/server.log") as server:
            assert server
            yield server


def rows(config: Config) -> list[dict[str, Any]]:
    return list(steps.read_lines(config.run / "answers.jsonl"))


def changed(config: Config, part: str, **fields: Any) -> Config:
    return config.model_copy(update={part: getattr(config, part).model_copy(update=fields)})


@pytest.fixture(scope="module")
def target() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


def test_answers_are_the_targets_own(config: Config, server: Server, target: Any) -> None:
    """Greedy, in the server's chat template, supervised where the target spoke; what it refused is counted."""
    assert "1 prompts refused" in steps.answers(config)
    assert [row["primary_id"] for row in rows(config)] == sorted(row["primary_id"] for row in rows(config))
    assert len(rows(config)) == PROMPTS
    for row in rows(config)[:3]:
        start = row["loss_mask"].index(1)
        assert row["loss_mask"] == [0] * start + [1] * (len(row["input_ids"]) - start)
        logits = target(torch.tensor([row["input_ids"]])).logits[0, start - 1 : -1]
        assert logits.argmax(-1).tolist() == row["input_ids"][start:]


def test_answers_that_were_cut_off_are_given_again(config: Config, server: Server) -> None:
    """A run that was killed while it wrote leaves half a line; the next one ends with the same file."""
    file = config.run / "answers.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) * 2 // 3])
    steps.answers(config)
    assert file.read_bytes() == whole


def test_a_document_longer_than_a_step_is_refused_or_split(config: Config) -> None:
    longest = max(len(row["input_ids"]) for row in rows(config))
    short = changed(config, "step", tokens=longest - 1)
    with pytest.raises(
        TrainError, match=f"1 of {len(rows(config)) - 1} documents .* the longest {longest}: raise step"
    ):
        steps.data(short)
    assert not config.data_folder.exists()
    assert "1 are longer than a step and split" in steps.data(changed(short, "data", long="split"))
    shutil.rmtree(config.data_folder)


def test_held_out_documents_come_last(config: Config) -> None:
    """speculators shuffles documents; those of the first prompts, answered greedily, are kept apart."""
    from datasets import load_from_disk

    steps.data(config)
    found = [row["input_ids"] for row in load_from_disk(str(config.data_folder)).with_format(None)]
    answered = [row["input_ids"] for row in rows(config)]
    assert sorted(found[-HELD_OUT:]) == sorted(answered[:HELD_OUT])
    assert sorted(found[:-HELD_OUT]) == sorted(answered[HELD_OUT:])


def test_hidden_states_are_the_targets(config: Config, server: Server, target: Any, capsys: Any) -> None:
    """Those that enter the layers of the head, and what leaves the last one, before its norm."""
    last: list[torch.Tensor] = []
    target.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
    steps.states(config)
    tokens = sum(len(row["input_ids"]) for row in rows(config))
    assert f"{tokens:,} tokens x 4 layers x 128 x 4 bytes" in capsys.readouterr().out
    assert json.loads((config.data_folder / STAMP).read_text()) == config.stamp
    for number in range(len(rows(config))):
        found = load_file(config.data_folder / f"hidden_states/hs_{number}.safetensors")
        states = target(found["token_ids"][None], output_hidden_states=True).hidden_states
        expected = torch.stack([*(states[layer][0] for layer in LAYERS), last[-1][0]], dim=1)
        torch.testing.assert_close(found["hidden_states"], expected, rtol=1e-3, atol=1e-3)


def test_spoiled_hidden_states_are_made_again(config: Config, server: Server) -> None:
    """One file that is cut off, one of another document, one that is missing."""
    folder = config.data_folder / "hidden_states"
    cut, other, missing = (folder / f"hs_{number}.safetensors" for number in (0, 1, 2))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    cut.write_bytes(cut.read_bytes()[:-7])
    shutil.copy(folder / "hs_3.safetensors", other)
    missing.unlink()
    assert f"those of {len(before) - 3} were there" in steps.states(config)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_without_its_server_a_step_can_be_tried_again(config: Config) -> None:
    """No server listens at this port; what is there stays."""
    elsewhere = changed(config, "data", endpoint=f"http://127.0.0.1:{free_port()}/v1")
    (config.data_folder / "hidden_states/hs_0.safetensors").unlink()
    with pytest.raises(TryAgain, match="Connection error"):
        steps.states(elsewhere)


def test_too_small_a_disk_is_said_beforehand(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil._ntuple_diskusage(10, 10, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(TrainError, match="not enough room"):
        steps.states(config)
