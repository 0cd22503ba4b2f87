"""Engines of several processes, tensor, data and pipeline parallel: output and drafts are those of one."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import OpenAI
from safetensors.torch import load_file, save_file

from peagle_tools.shared import processes
from tests.features.comparing import SETTINGS, Case, K, outputs, tokens
from tests.support.models import PEAGLE, TARGET, prompt_token_ids
from tests.support.random_heads import VOCAB, HeadSpec, write_head, write_pair
from tests.support.serving import START_SECONDS, environment, free_port, running, start

pytestmark = pytest.mark.arm("plugin-v1")  # of this process; each process that it starts has its own

SPECULATIVE = {"method": "eagle3", "model": str(PEAGLE), "num_speculative_tokens": K, "parallel_drafting": True}


def command(port: int, *arguments: str) -> list[str]:
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(TARGET), "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "192", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(64 << 20)),
        *("--speculative-config", json.dumps(SPECULATIVE), *arguments),
    ]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["tensor", "data"])
def test_two_ranks_give_the_output_of_one(kind: str):
    cases = [Case(i, 24) for i in range(4)]
    alone = [tokens(output)[0] for output in outputs(SETTINGS, cases)]
    port = free_port()
    with running(command(port, f"--{kind}-parallel-size", "2"), port, environment()) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        together = [
            client.completions.create(
                model="tiny",
                prompt=prompt_token_ids()[case.prompt],
                max_tokens=case.max_tokens,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            for case in cases
        ]
        drafted = server.metric("vllm:spec_decode_num_draft_tokens_total")
        announced = server.log().count("P-EAGLE active: Model Runner V1, K=5, head trained 8 deep")
    assert announced == 1
    assert [answer.choices[0].token_ids for answer in together] == alone
    assert drafted > 0


def run_together(folder: Path, module: str, arguments: list[str], environments: list[dict[str, str]]) -> None:
    """Run a module of this folder on Model Runner V2 to its end: a process for each environment in ``each``."""
    command = [sys.executable, "-m", f"tests.features.{module}", str(folder), *arguments]
    common = environment() | {"PEAGLE_TEST_ARM": "plugin-v2"}
    started: list[psutil.Popen] = []
    logs = [folder / f"{module}{i}.log" for i in range(len(environments))]
    deadline = time.monotonic() + START_SECONDS
    try:
        for path, own_environment in zip(logs, environments, strict=True):
            with path.open("w") as log:
                started.append(start(command, common | own_environment, log))
        # One that failed is the end of all: the others would wait for it.
        while (
            None in (ended := [process.poll() for process in started])
            and not any(ended)
            and time.monotonic() < deadline
        ):
            time.sleep(0.2)
    finally:
        for process in started:
            processes.end(process)
    wrote = [path.read_text()[-3000:] for path in logs]
    assert set(ended) == {0}, "\n".join([f"exit codes {ended} (None: ended by this test)", *wrote])


def reports_of_ranks(folder: Path, kind: str, arm: str = "plugin-v2") -> list[dict[str, Any]]:
    """Run ``tests.features.rank`` on two ranks. Returns what each wrote."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PEAGLE_TEST_ARM": arm}
    run_together(folder, "rank", [kind], [world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)])
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_data_parallel_ranks_draft_without_asking_each_other(tmp_path: Path):
    """V2: no collective in a draft step, and no graph dropped because of another rank's prefill.

    Each rank compares its own drafts and output with the simulation, which is what one rank alone drafts.
    """
    write_pair(tmp_path, family="qwen3_moe")
    ranks = reports_of_ranks(tmp_path, "data")
    for how in ("eager", "graphs"):
        steps_of_ranks = [rank[how]["steps"] for rank in ranks]
        in_propose = [sum(step["collectives"] for step in steps) for steps in steps_of_ranks]
        everywhere = [rank[how]["collectives"] for rank in ranks]
        print(f"{how}: collectives of the ranks in propose {in_propose}, in all {everywhere}")
        together = {tuple(step["batch"] for step in steps) for steps in zip(*steps_of_ranks, strict=True)}
        assert {("decode", "prefill"), ("decode", "dummy")} <= together
        assert all(rank[how]["rows"] > 3 for rank in ranks)
        assert all(everywhere), "the target's layers exchange rows, so the counter sees nothing"
        assert in_propose == [0, 0]
    eager = [
        step["batch"] for steps in steps_of_ranks for step in steps if step["batch"] != "prefill" and not step["graph"]
    ]
    assert not eager, f"these drafted without their graph: {eager}"


def test_tensor_parallel_ranks_draft_what_one_drafts(tmp_path: Path):
    """V2; the selector's candidates are those of all ranks."""
    write_pair(tmp_path, HeadSpec(selector=True))
    assert all(rank["rows"] > 12 for rank in reports_of_ranks(tmp_path, "tensor"))


@pytest.mark.parametrize("arm", ["plugin-v1", "plugin-v2"])
def test_embeddings_that_are_the_targets_on_one_rank_only(arm: str, tmp_path: Path):
    """vLLM would share them there, where an update of the head's would then be ignored."""
    target, head = write_pair(tmp_path)
    write_head(tmp_path / "new", target, HeadSpec(seed=2))
    weights, shared = load_file(head / "model.safetensors"), load_file(target / "model.safetensors")
    for name, other in (("embed_tokens.weight", "model.embed_tokens.weight"), ("lm_head.weight", "lm_head.weight")):
        weights[name][: VOCAB // 2] = shared[other][: VOCAB // 2]
    save_file(weights, head / "model.safetensors")
    for rank in reports_of_ranks(tmp_path, "tensor", arm):
        assert rank["rows"] > 12 and rank["updated"] > 12


def test_the_last_pipeline_stage_drafts_what_one_process_drafts(tmp_path: Path):
    """V2; the first stage sends two of three aux hidden states; embeddings and lm_head are the target's."""
    write_pair(tmp_path, HeadSpec(own_embeddings=False, own_lm_head=False))
    run_together(tmp_path, "stages", [], [{}])
