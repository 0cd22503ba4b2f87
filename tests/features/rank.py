"""One rank of an engine, and, on Model Runner V2, the collectives of each of its draft steps.

    PEAGLE_TEST_ARM=plugin-v2 RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=... \\
        python -m tests.features.rank FOLDER data   # or tensor, which updates to the weights in FOLDER/new
    # reads FOLDER/target and FOLDER/head, writes FOLDER/rank0.json

This is vLLM's external launcher: each rank is an engine of its own, in a process of its own. Under data parallelism the
ranks exchange before a step who has requests left; one that has none runs a dummy batch with the others. The target
must then be a mixture of experts, whose layers exchange rows between ranks: dense models run apart. Tensor parallel
ranks have the same requests.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import ARM
from tests.support.engines import Engine, Request, Settings, engine, shut_down
from tests.support.graphs import Seen, emulate
from tests.support.random_heads import prompt
from tests.support.recorder import serve_exactly
from tests.support.reference import Reference
from tests.support.updates import TRANSFER, files, updatable, update
from tools.interpreter import torch_twins

K, MAX_MODEL_LEN = 4, 96
RANKS = 2
# The first rank decodes while the second is still at the prefill of its long prompt; then the second has nothing left.
REQUESTS = (
    [Request("decodes", prompt(9), 40)],
    [Request("short", prompt(9, 1), 4), Request("long", prompt(70, 2), 10)],
)


class Collectives(TorchDispatchMode):
    """Counts the collectives of a block: all of torch.distributed passes here, as operators of c10d."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


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


def watch_steps(live: Engine, seen: Seen | None) -> list[dict[str, Any]]:
    """Each call of ``propose``, dummy batches included: its kind, how many collectives, whether a graph served it.

    ``record``, begun after it, takes the wrapper away with its own.
    """
    propose, steps = live.drafter.propose, []

    def watched(input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        before = seen.replayed.total() if seen else 0
        with Collectives() as collectives:
            drafts = propose(input_batch, *args, **kwargs)
        prefill = input_batch.num_scheduled_tokens.max() > K + 1
        batch = "dummy" if kwargs.get("dummy_run") else "prefill" if prefill else "decode"
        graph = bool(seen) and seen.replayed.total() > before
        steps.append({"batch": batch, "collectives": collectives.count.total(), "graph": graph})
        return drafts

    live.drafter.propose = watched
    return steps


def serve(live: Engine, requests: Sequence[Request], reference: Reference, seen: Seen | None) -> dict[str, Any]:
    """Drafts and output must equal the simulation's, which is what one rank alone drafts."""
    steps = watch_steps(live, seen)
    with Collectives() as everywhere:
        report, _ = serve_exactly(live, requests, reference)
    return {"steps": steps, "rows": report.rows, "collectives": everywhere.count.total()}


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    rank = int(os.environ["RANK"])
    target, head = folder / "target", folder / "head"
    external = ("distributed_executor_backend", "external_launcher"), (f"{kind}_parallel_size", RANKS)
    settings = Settings(target, head, k=K, max_model_len=MAX_MODEL_LEN, token_budget=12, llm=external)
    if kind == "data":
        live, reference = engine(settings), Reference(target, head)
        asked = REQUESTS[rank]
        let_ranks_differ_in_rows()
        if ARM == "plugin-v1":
            result = {"rows": serve_exactly(live, asked, reference)[0].rows}
        else:
            result = {"eager": serve(live, asked, reference, None)}
            with emulate(live, [1, 2]) as seen:
                result["graphs"] = serve(live, asked, reference, seen)
    else:
        live, asked = updatable(replace(settings, llm=(*external, TRANSFER))), [*REQUESTS[0], *REQUESTS[1]]
        result = {"rows": serve_exactly(live, asked, Reference(target, head))[0].rows}
        update(live, *files(folder / "new"))
        result["updated"] = serve_exactly(live, asked, Reference(target, folder / "new"))[0].rows
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    shut_down()


if __name__ == "__main__":
    with torch_twins():
        main()
