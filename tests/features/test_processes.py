"""Engines of several processes, tensor, data and pipeline parallel: output and drafts are those of one.

Processes are forked from this one, which has imported vLLM. Ranks use vLLM's external launcher: each is an engine of
its own. Under data parallelism they exchange before a step who has requests left; one that has none runs a dummy batch
with the others. The target must then be a mixture of experts, whose layers exchange rows between ranks: dense models
run apart. Tensor parallel ranks have the same requests.
"""

import itertools
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import ARM
from tests.support.dialects import read
from tests.support.engines import Engine, Request, Settings, engine, prepare_process, shut_down
from tests.support.graphs import Seen, emulate
from tests.support.operations import Operations
from tests.support.random_heads import VOCAB, HeadSpec, prompt, write_head, write_pair, write_selector
from tests.support.recorder import Recording, compare, planter, record, serve_exactly
from tests.support.reference import Reference
from tests.support.serving import free_port
from tests.support.updates import TRANSFER, files, updatable, update

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")

full_on_v1 = pytest.mark.full if ARM == "plugin-v1" else lambda test: test
K, MAX_MODEL_LEN, RANKS = 4, 96, 2
DECODES, SHORT = Request("decodes", prompt(9), 40), Request("short", prompt(9, 1), 4)
LONG = Request("long", prompt(70, 2), 10)


def run_ranks(function: Callable[..., dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What ``function(rank, folder)`` returns in each rank's process; the first one that fails ends all."""
    prepare_process()
    import vllm  # noqa: F401  (before the fork, once)

    shut_down()
    world = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    torch.multiprocessing.start_processes(_run_rank, (function, folder, world), RANKS, start_method="fork")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def _run_rank(rank: int, function: Callable[..., dict[str, Any]], folder: Path, world: dict[str, str]) -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    os.environ |= world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    # vLLM's shared memory outlives a forked process: ranks exchange through torch.distributed.
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
    (folder / f"rank{rank}.json").write_text(json.dumps(function(rank, folder)))
    shut_down()


def settings(folder: Path, *llm: tuple[str, Any]) -> Settings:
    llm = ("distributed_executor_backend", "external_launcher"), *llm
    return Settings(folder / "target", folder / "head", k=K, max_model_len=MAX_MODEL_LEN, token_budget=12, llm=llm)


def collectives() -> Operations:
    """Counts all of torch.distributed, which passes as operators of c10d."""
    return Operations(lambda operation, _: "c10d" in operation.namespace, on=True)


def let_ranks_differ_in_rows() -> None:
    """Mixture-of-experts layers gather the rows of all ranks; vLLM's CPU communicator can only gather equal numbers.

    Ends when ``CpuCommunicator`` has these two, which 0.32 and 0.33 lack.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self: Any, rows: Any, dim: int, sizes: list[int]) -> Any:
        if not isinstance(rows, torch.Tensor):
            return [all_gatherv(self, tensor, dim, sizes) for tensor in rows]
        padded = [rows.new_zeros(max(sizes), *rows.shape[1:]) for _ in range(1 + len(sizes))]
        padded[0][: len(rows)] = rows
        torch.distributed.all_gather(padded[1:], padded[0], group=self.device_group)
        return torch.cat([rank[:size] for rank, size in zip(padded[1:], sizes, strict=True)])

    def reduce_scatterv(self: Any, rows: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        torch.distributed.all_reduce(rows, group=self.device_group)
        return rows.split(sizes)[self.rank_in_group]

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv


def watch_steps(live: Engine, seen: Seen) -> list[dict[str, Any]]:
    """Each call of V2's ``propose``, dummy batches included: its kind, how many collectives, whether a graph served it.

    ``record``, begun after it, takes the wrapper away with its own.
    """
    propose, steps = live.drafter.propose, []

    def watched(input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        before = seen.replayed.total()
        with collectives() as inside:
            drafts = propose(input_batch, *args, **kwargs)
        prefill = input_batch.num_scheduled_tokens.max() > K + 1
        batch = "dummy" if kwargs.get("dummy_run") else "prefill" if prefill else "decode"
        graph = seen.replayed.total() > before
        steps.append({"batch": batch, "collectives": inside.calls.total(), "graph": graph})
        return drafts

    live.drafter.propose = watched
    return steps


def data_parallel(rank: int, folder: Path) -> dict[str, Any]:
    """The first rank decodes while the second is still at the prefill of its long prompt, and has nothing left.

    Drafts and output must equal the simulation's, which is what one rank alone drafts.
    """
    let_ranks_differ_in_rows()
    # Engines of the external launcher, unlike servers, do not keep step when they schedule asynchronously.
    live = engine(settings(folder, ("data_parallel_size", RANKS), ("async_scheduling", False)))
    with emulate(live, [1, 2]) if ARM == "plugin-v2" else nullcontext() as seen:
        steps = watch_steps(live, seen) if seen else []
        with collectives() as everywhere:
            requests = [[DECODES], [SHORT, LONG]][rank]
            report, _ = serve_exactly(live, requests, Reference(folder / "target", folder / "head"))
    return {"steps": steps, "rows": report.rows, "collectives": everywhere.calls.total()}


@full_on_v1
def test_data_parallel_ranks_draft_without_asking_each_other(tmp_path: Path):
    """V2: no collective in a draft step, and no graph dropped because of another rank's prefill."""
    write_pair(tmp_path, family="qwen3_moe")
    ranks = run_ranks(data_parallel, tmp_path)
    assert all(rank["rows"] > 3 for rank in ranks)
    assert all(rank["collectives"] for rank in ranks), "the target's layers exchange rows"
    if ARM == "plugin-v2":
        steps_of_ranks = [rank["steps"] for rank in ranks]
        together = {tuple(step["batch"] for step in steps) for steps in zip(*steps_of_ranks, strict=True)}
        assert {("decode", "prefill"), ("decode", "dummy")} <= together
        for step in itertools.chain(*steps_of_ranks):
            assert not step["collectives"] and (step["graph"] or step["batch"] == "prefill")


def tensor_parallel(rank: int, folder: Path) -> dict[str, Any]:
    target, head, new = folder / "target", folder / "head", folder / "new"
    live, requests = updatable(settings(folder, ("tensor_parallel_size", RANKS), TRANSFER)), [DECODES, SHORT, LONG]
    first = serve_exactly(live, requests, Reference(target, head))[0]
    update(live, *files(new))
    return {"rows": min(first.rows, serve_exactly(live, requests, Reference(target, new))[0].rows)}


@full_on_v1
def test_tensor_parallel_ranks_draft_what_one_drafts(tmp_path: Path):
    """The selector's candidates are those of all ranks.

    The embeddings are the target's on one rank only: vLLM would share them there, where an update would be ignored.
    """
    target, head = write_pair(tmp_path)
    write_head(tmp_path / "new", target, HeadSpec(selector=True, seed=2))
    partly, shared = read(head), read(target).tensors
    for name, other in (("embed_tokens.weight", "model.embed_tokens.weight"), ("lm_head.weight", "lm_head.weight")):
        partly.tensors[name][: VOCAB // 2] = shared[other][: VOCAB // 2]
    partly.save(head)
    write_selector(head, torch.Generator().manual_seed(0))
    assert all(rank["rows"] > 12 for rank in run_ranks(tensor_parallel, tmp_path))


def begin_recording(worker: Any, right: dict[str, list[int]]) -> bool:
    """Record and plant in a stage's process. Returns whether the stage drafts."""
    drafter = worker.model_runner.speculator
    if drafter is not None:
        worker.recording = record(SimpleNamespace(drafter=drafter), planter(right, VOCAB))  # type: ignore[arg-type]
        worker.noted = worker.recording.__enter__()
    return drafter is not None


def noted(worker: Any) -> Recording | None:
    return getattr(worker, "noted", None)


@pytest.mark.arm("plugin-v2")
def test_the_last_pipeline_stage_drafts_what_one_process_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first stage sends two of three aux hidden states; embeddings and lm_head are the target's."""
    target, head = write_pair(tmp_path, HeadSpec(own_embeddings=False, own_lm_head=False))
    requests, reference = [DECODES, SHORT, replace(LONG, arrives=2)], Reference(target, head)
    right = {request.id: reference.greedy(request.prompt, request.max_tokens) for request in requests}
    shut_down()
    prepare_process()
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config

    @staticmethod
    def check_and_update_config(vllm_config: Any) -> None:
        original(vllm_config)
        monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", check_and_update_config)
    stages = ("distributed_executor_backend", "mp"), ("pipeline_parallel_size", 2)
    live = engine(replace(settings(tmp_path), llm=stages))
    assert live.llm.collective_rpc(begin_recording, args=(right,)) == [False, True]
    finished = live.run(requests)
    report = compare(live.llm.collective_rpc(noted)[-1], finished, reference, live.settings)
    shut_down()
    print(report)
    assert {req: done.tokens for req, done in finished.items()} == right
    assert report.rows > 12 and report.dropped["partial prefill"]
