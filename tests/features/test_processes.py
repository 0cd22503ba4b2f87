"""Engines of several processes, tensor, data and pipeline parallel: output and drafts are those of one."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle_tools.shared import processes
from tests.support.random_heads import VOCAB, HeadSpec, write_head, write_pair, write_selector
from tests.support.serving import ROOT, START_SECONDS, free_port

pytestmark = pytest.mark.arm("plugin-v1")  # of this process; each process that it starts has its own


def run_together(folder: Path, module: str, arguments: list[str], environments: list[dict[str, str]]) -> None:
    """Run a module of this folder on Model Runner V2 to its end: a process for each environment."""
    command = [sys.executable, "-m", f"tests.features.{module}", str(folder), *arguments]
    started: list[psutil.Popen] = []
    logs = [folder / f"{module}{i}.log" for i in range(len(environments))]
    deadline = time.monotonic() + START_SECONDS
    try:
        for log, variables in zip(logs, environments, strict=True):
            started.append(
                processes.start(command, cwd=ROOT, env={"PEAGLE_TEST_ARM": "plugin-v2"} | variables, log=log)
            )
        # One that failed is the end of all: the others would wait for it.
        while None in (ended := [process.poll() for process in started]) and not any(ended):
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
    finally:
        for process in started:
            processes.end(process)
    wrote = [log.read_text()[-3000:] for log in logs]
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


@pytest.mark.full
def test_data_parallel_ranks_of_v1_draft_what_one_drafts(tmp_path: Path):
    write_pair(tmp_path, family="qwen3_moe")
    assert all(rank["rows"] > 3 for rank in reports_of_ranks(tmp_path, "data", "plugin-v1"))


@pytest.mark.parametrize("arm", [pytest.param("plugin-v1", marks=pytest.mark.full), "plugin-v2"])
def test_tensor_parallel_ranks_draft_what_one_drafts(arm: str, tmp_path: Path):
    """The selector's candidates are those of all ranks.

    The embeddings are the target's on one rank only: vLLM would share them there, where an update would be ignored.
    """
    target, head = write_pair(tmp_path)
    write_head(tmp_path / "new", target, HeadSpec(selector=True, seed=2))
    weights, shared = load_file(head / "model.safetensors"), load_file(target / "model.safetensors")
    for name, other in (("embed_tokens.weight", "model.embed_tokens.weight"), ("lm_head.weight", "lm_head.weight")):
        weights[name][: VOCAB // 2] = shared[other][: VOCAB // 2]
    save_file(weights, head / "model.safetensors")
    write_selector(head, torch.Generator().manual_seed(0))
    for rank in reports_of_ranks(tmp_path, "tensor", arm):
        assert rank["rows"] > 12 and rank["updated"] > 12


def test_the_last_pipeline_stage_drafts_what_one_process_drafts(tmp_path: Path):
    """V2; the first stage sends two of three aux hidden states; embeddings and lm_head are the target's."""
    write_pair(tmp_path, HeadSpec(own_embeddings=False, own_lm_head=False))
    run_together(tmp_path, "stages", [], [{}])
