"""The draft step as a CUDA graph, emulated on a CPU (``support.graphs``): its drafts equal the simulation's too.

On the host it is one launch and one replay; in the graph is nothing that a GPU refuses.
"""

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map_only

from tests.drafts.grid import FACTORS, MAX_MODEL_LEN, requests
from tests.support.engines import Engine, Request, Settings, engine
from tests.support.graphs import Seen, emulate
from tests.support.operations import Operations
from tests.support.random_heads import HeadSpec, prompt, write_pair
from tests.support.recorder import Report, serve_exactly
from tests.support.reference import Reference

pytestmark = pytest.mark.arm("plugin-v2")

COUNTS = [1, 2, 4]  # three requests are padded to four
MIXED = HeadSpec(draft_vocab=200, layers=3, norm_before_fc=True, norm_before_residual=True, selector=True)

# Never more than three at once before the last: short prompts, a long one, one to the very end.
REQUESTS = [
    Request("short", prompt(3, 1), 24),
    Request("end", prompt(MAX_MODEL_LEN - 14, 2), 14),
    Request("long", prompt(70, 3), 20),
    Request("later", prompt(1, 4), 16, arrives=6),
]


def exact(live: Engine, pair: tuple[Path, Path], asked: list[Request], **graphs: Any) -> tuple[Report, Seen]:
    """Run with planted drafts through emulated graphs; drafts and output must equal the simulation's."""
    with emulate(live, COUNTS, **graphs) as seen:
        report, _ = serve_exactly(live, asked, Reference(*pair))
    print(seen)
    return report, seen


def start(target: Path, head: Path, k: int, **changes: object) -> Engine:
    return engine(Settings(target, head, k=k, max_model_len=MAX_MODEL_LEN, **changes))


@pytest.mark.parametrize("k", [pytest.param(k, marks=pytest.mark.kernels if k in (2, 3) else ()) for k in FACTORS["k"]])
def test_drafts_of_a_replayed_graph(k: int, tmp_path: Path):
    """Every K: unequal verify lengths, prompts shorter than 2K, requests at max_model_len, padding requests."""
    pair = write_pair(tmp_path, MIXED if k % 2 else HeadSpec())
    report, seen = exact(start(*pair, k), pair, REQUESTS)
    assert report.rows > 10
    assert seen.captured == [(n, 2 * k) for n in reversed(COUNTS)]
    assert seen.replayed.total() == sum(seen.depths.values()) > 5
    assert seen.padded > 0
    assert seen.unequal > 0
    assert report.near_end > 0 or k < 3  # with fewer, no row can pass the end


def test_every_depth_uses_the_graph_there_is(tmp_path: Path):
    """No schedule, so one shape for K = 0 .. 4; without drafts the drafter's KV is written all the same."""
    pair, k = write_pair(tmp_path), 4
    live, depths = start(*pair, k), itertools.cycle((4, 0, 1, 3, 2))
    run = live.run

    def run_at_depths(asked: list[Request]) -> Any:
        """As vLLM 0.33 asks for no drafts where nobody could use them. The recorder, around this, sees these K."""
        propose = live.drafter.propose

        def sometimes_fewer(*args: Any, **kwargs: Any) -> torch.Tensor:
            drafts = propose(*args, **kwargs | {"num_speculative_tokens": next(depths)})
            return drafts.clamp(min=0)  # columns that were not drafted hold anything

        with patch.object(live.drafter, "propose", sometimes_fewer):
            return run(asked)

    with patch.object(live, "run", run_at_depths):
        report, seen = exact(live, pair, REQUESTS)
    assert seen.captured == [(n, 2 * k) for n in reversed(COUNTS)]
    assert set(seen.depths) == {0, 1, 2, 3, 4}
    assert seen.replayed.total() == sum(seen.depths.values())
    assert report.dropped["without drafts"] > 0


def test_a_schedule_has_graphs_of_each_k(tmp_path: Path):
    """Two requests draft 4 tokens, three draft 1 and four none: in 8, 2 and 1 rows each."""
    pair, schedule = write_pair(tmp_path, MIXED), [(1, 2, 4), (3, 3, 1), (4, 8, 0)]
    live = start(*pair, 4, speculative=(("num_speculative_tokens_per_batch_size", schedule),))
    report, seen = exact(live, pair, REQUESTS)
    assert {length for _, length in seen.captured} == {length for _, length in seen.replayed} == {8, 2, 1}
    assert set(seen.depths) == {4, 1, 0}
    assert report.rows > 10


def test_metadata_before_a_replay_is_built_without_waiting(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    """Where metadata is rebuilt, nothing on the device is read back, which a meta tensor refuses."""
    metadata = start(*pair, 3).drafter.attention
    on_device = partial(tree_map_only, torch.Tensor, lambda tensor: tensor.to("meta"))
    tables = metadata.block_tables
    tables = SimpleNamespace(input_block_tables=on_device(tables.input_block_tables), block_sizes=tables.block_sizes)
    monkeypatch.setattr("peagle_vllm.v2.attention.build_attn_metadata", lambda **arguments: arguments)
    rebuilt = replace(metadata, buffers=on_device(metadata.buffers), block_tables=tables).metadata(
        2, np.array([0, 6], dtype=np.int32), num_rows=12, seq_lens_bound=np.array([9], dtype=np.int32)
    )
    assert rebuilt["query_start_loc_cpu"].tolist() == [0, 6, 6]
    assert rebuilt["seq_lens_cpu_upper_bound"].tolist() == [9, 0]
    assert (rebuilt["num_tokens"], rebuilt["max_query_len"], rebuilt["max_seq_len"]) == (12, 6, 9)


@pytest.mark.parametrize(("case", "k"), [("chunked", 3), ("chunked", 18), ("decodes without FULL", 7)])
def test_batches_with_a_prefill_draft_from_piecewise_graphs(case: str, k: int, tmp_path: Path):
    """A prefill beside decodes: its draft batch runs in captured pieces, where its rows do not exceed the largest.

    Prefill chunks have up to 32 rows; the KV blocks are those of two and a half requests, so that some are preempted.
    """
    pair = write_pair(tmp_path, MIXED)
    mode = "FULL_AND_PIECEWISE" if case == "chunked" else "PIECEWISE"
    live = start(*pair, k, token_budget=32, kv_blocks=12, prefix_caching=True)
    report, seen = exact(live, pair, requests(6, 20), sizes=(16, 32, 48), mode=mode)
    assert seen.pieces.total() > 3
    assert seen.eager == 0
    assert bool(seen.replayed) == (mode != "PIECEWISE")
    assert report.rows > 20 and report.near_end > 0


@pytest.mark.parametrize("how", ["rebuilt", "kernel_blocks", "profiled", "profiled, rebuilt"])
def test_nothing_that_a_graph_reads_grows_stale(how: str, tmp_path: Path):
    """Requests of several KV blocks each, captured before any of them came: tables, lengths and schedules are new.

    ``rebuilt``: the backend cannot refresh its metadata inside the graph. ``kernel_blocks``: its table is another
    tensor than the KV cache manager's. ``profiled``: without ``kv_cache_memory_bytes`` vLLM captures twice, first on a
    KV cache and in a pool that it throws away.
    """
    pair, k = write_pair(tmp_path, MIXED), 3
    live, ways = start(*pair, k, token_budget=32), how.split(", ")
    graphs = {"in_place": "rebuilt" not in ways} | {way: way in ways for way in ("kernel_blocks", "profiled")}
    report, seen = exact(live, pair, requests(6, 20), sizes=(16, 32, 48), **graphs)
    assert seen.captured == [(n, 2 * k) for n in reversed(COUNTS)] * (2 if "profiled" in ways else 1)
    assert seen.replayed.total() > 5 and seen.pieces.total() > 3
    assert seen.eager == 0
    assert report.rows > 20
    assert live.drafter.block_tables is live.runner.block_tables


ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")
FORBIDDEN = (
    *("aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select"),
    *("aten::_to_copy", "aten::lift_fresh", "aten::repeat_interleave.Tensor"),
)


def is_work(operation: Any, values: Any) -> bool:
    """What a GPU's host would launch or copy: views and allocations are neither."""
    name = operation.name().split(".")[0]
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in operation._schema.returns)
    return (name == "aten::lift_fresh" or not is_view) and name not in ALLOCATIONS


def is_forbidden(operation: Any, values: Any) -> bool:
    """What a CUDA graph cannot hold: a sync (a boolean index makes one), or data that comes from the host."""
    indices = values[0][1] if operation.name().startswith(("aten::index.", "aten::index_put")) else ()
    is_masked = any(index is not None and index.dtype == torch.bool for index in indices)
    return is_masked or operation.name().startswith(FORBIDDEN)


@pytest.mark.kernels
@pytest.mark.parametrize("case", ["greedy", "selector", "probabilistic"])
def test_a_decode_step_is_one_launch_and_one_replay(case: str, tmp_path: Path) -> None:
    """A graph holds what follows prepare_inputs; the drafter's forward in it is vLLM's.

    Where vLLM pads the vocabulary (not 256), it masks the padding with a number that only a CPU copies.
    """
    method = (("draft_sample_method", "probabilistic"),) if case == "probabilistic" else ()
    spec = HeadSpec(draft_vocab=256, norm_before_fc=True, norm_before_residual=True, selector=case == "selector")
    live = engine(Settings(*write_pair(tmp_path, spec), k=3, speculative=method))
    from triton.runtime.interpreter import GridExecutor
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    from peagle_vllm.v2 import speculator

    drafter, host, graph, steps = live.drafter, Operations(is_work), Operations(is_forbidden), []
    propose, execute = host.within(drafter.propose), host.within(GridExecutor.__call__, on=False)

    def counted_propose(*args: Any, **kwargs: Any) -> Any:
        host.calls.clear()
        replays = seen.replayed.total()
        drafts = propose(*args, **kwargs)
        steps.append((seen.replayed.total() - replays, dict(+host.calls)))
        return drafts

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        host.calls[self.fn.__name__] += host.on
        return execute(self, *args, **kwargs)

    # The emulated graph's own operations, and what ``emulate`` adds around ``prepare_inputs``, do not count.
    with (
        patch.object(speculator, "prepare_inputs", host.within(speculator.prepare_inputs)),
        emulate(live, [4]) as seen,
        patch.object(speculator, "prepare_inputs", host.within(speculator.prepare_inputs, on=False)),
        patch.object(CudaGraphManager, "run_fullgraph", host.within(CudaGraphManager.run_fullgraph, on=False)),
        patch.object(GridExecutor, "__call__", launch),
        patch.object(drafter, "propose", counted_propose),
        patch.object(drafter, "_draft", graph.within(drafter._draft)),
        patch.object(drafter, "_forward", graph.within(drafter._forward, on=False)),
        host,
        graph,
    ):
        live.run([Request(f"{case}.{i}", prompt(5, i), 9) for i in range(4)])
    replayed = [calls for replays, calls in steps if replays == 1]
    assert len(replayed) > 2
    assert all(calls == {"_prepare_inputs_kernel": 1} for calls in replayed), replayed
    assert any(len(calls) > 5 for replays, calls in steps if not replays), "a prefill's step has operations"
    assert not graph.calls
    x = torch.tensor([1.0, -1.0])
    for forbidden in (lambda: x[x > 0], lambda: x.sum().item(), lambda: x.copy_(torch.tensor([1.0, 2.0])), x.nonzero):
        with (watch := Operations(is_forbidden)):
            watch.within(forbidden)()
        assert watch.calls
