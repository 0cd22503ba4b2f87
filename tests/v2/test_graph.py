"""The draft step as a CUDA graph, emulated on a CPU (``support.graphs``): its drafts equal the simulation's too."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.drafts.grid import FACTORS, MAX_MODEL_LEN
from tests.support.engines import Engine, Request, Settings, engine
from tests.support.graphs import Seen, emulate
from tests.support.random_heads import HeadSpec, prompt, write_pair
from tests.support.recorder import Report, serve_exactly
from tests.support.reference import Reference

pytestmark = pytest.mark.arm("plugin-v2")

COUNTS = [1, 2, 4]  # three requests are padded to four
MIXED = HeadSpec(draft_vocab=200, layers=3, norm_before_fc=True, norm_before_residual=True, selector=True)


def requests(name: str) -> list[Request]:
    """Four in all, never more than three at once before the last: short prompts, a long one, two to the very end."""
    return [
        Request(f"{name}.short", prompt(3, 1), 24),
        Request(f"{name}.end", prompt(MAX_MODEL_LEN - 14, 2), 14),
        Request(f"{name}.long", prompt(70, 3), 20),
        Request(f"{name}.later", prompt(1, 4), 16, arrives=6),
    ]


def exact(live: Engine, pair: tuple[Path, Path], asked: list[Request], **graphs: Any) -> tuple[Report, Seen]:
    """Run with planted drafts through emulated graphs; drafts and output must equal the simulation's."""
    with emulate(live, COUNTS, **graphs) as seen:
        report, _ = serve_exactly(live, asked, Reference(*pair))
    print(seen)
    return report, seen


def run_at(depths: Sequence[int], live: Engine, run: Callable[..., Any], asked: list[Request]) -> Any:
    """Another K each step, without a schedule, as vLLM 0.33 asks for none where nobody could use the drafts.

    The recorder, which must see this K, takes the wrapper away with its own.
    """
    propose, depth = live.drafter.propose, itertools.cycle(depths)

    def sometimes_fewer(*args: Any, **kwargs: Any) -> torch.Tensor:
        drafts = propose(*args, **kwargs | {"num_speculative_tokens": next(depth)})
        return drafts.clamp(min=0)  # columns that were not drafted hold anything

    live.drafter.propose = sometimes_fewer
    return run(asked)


def start(target: Path, head: Path, k: int, **changes: object) -> Engine:
    return engine(Settings(target, head, k=k, max_model_len=MAX_MODEL_LEN, **changes))


@pytest.mark.parametrize("k", [pytest.param(k, marks=pytest.mark.kernels if k in (2, 3) else ()) for k in FACTORS["k"]])
def test_drafts_of_a_replayed_graph(k: int, tmp_path: Path):
    """Every K: unequal verify lengths, prompts shorter than 2K, requests at max_model_len, padding requests."""
    pair = write_pair(tmp_path, MIXED if k % 2 else HeadSpec())
    report, seen = exact(start(*pair, k), pair, requests(f"k{k}"))
    assert report.rows > 10
    assert seen.captured == [(n, 2 * k) for n in reversed(COUNTS)]
    assert seen.replayed.total() == sum(seen.depths.values()) > 5
    assert seen.padded > 0
    assert seen.unequal > 0
    assert report.near_end > 0 or k < 3  # with fewer, no row can pass the end


def test_a_schedule_needs_no_recapture(tmp_path: Path):
    """K' = 0, 2 and 5 by batch size: one shape for each, no drafts where K' = 0, and KV kept all the same."""
    pair, k = write_pair(tmp_path, HeadSpec(selector=True)), 5
    schedule = [(1, 2, 5), (3, 3, 2), (4, 4, 0)]
    live = start(*pair, k, speculative=(("num_speculative_tokens_per_batch_size", schedule),))
    report, seen = exact(live, pair, requests("schedule"))
    assert {length for _, length in seen.captured} == {k + 5, k + 2, k + 1}
    assert set(seen.depths) == {0, 2, 5}
    assert seen.replayed.total() == sum(seen.depths.values())
    assert report.rows > 10


def test_every_depth_uses_the_graph_there_is(tmp_path: Path):
    """Trap 14: no schedule, so one shape for K = 0 .. 4; without drafts the drafter's KV is written all the same."""
    pair, k = write_pair(tmp_path), 4
    live = start(*pair, k)
    with patch.object(live, "run", partial(run_at, (4, 0, 1, 3, 2), live, live.run)):
        report, seen = exact(live, pair, requests("depths"))
    assert seen.captured == [(n, 2 * k) for n in reversed(COUNTS)]
    assert set(seen.depths) == {0, 1, 2, 3, 4}
    assert seen.replayed.total() == sum(seen.depths.values())
    assert report.dropped["without drafts"] > 0


class Forbidden(TorchDispatchMode):
    """Notes what a CUDA graph cannot hold: a sync (a boolean index makes one), or data that comes from the host."""

    NAMES = (
        *("aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select"),
        *("aten::_to_copy", "aten::lift_fresh", "aten::repeat_interleave.Tensor"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        indices = args[1] if func.name().startswith(("aten::index.", "aten::index_put")) else ()
        masked = any(index is not None and index.dtype == torch.bool for index in indices)
        if masked or func.name().startswith(self.NAMES):
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.kernels
def test_the_graph_holds_no_sync_and_no_copy_from_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Trap 15: everything after prepare_inputs, the drafter's forward apart, which is vLLM's.

    Where vLLM pads the vocabulary (not 256), it masks the padding with a number that only a CPU copies.
    """
    pair = write_pair(tmp_path, replace(MIXED, draft_vocab=256))
    live = start(*pair, 4)
    mode, forward = Forbidden(), live.drafter._forward
    draft, runs = live.drafter._draft, []

    def outside(batch):
        mode.__exit__(None, None, None)
        try:
            return forward(batch)
        finally:
            mode.__enter__()

    def watched(batch):
        runs.append(batch)
        with mode:
            draft(batch)

    monkeypatch.setattr(live.drafter, "_forward", outside)
    monkeypatch.setattr(live.drafter, "_draft", watched)
    live.run([Request("watched", prompt(9, 5), 12)])
    assert runs
    assert mode.seen == []
    x = torch.tensor([1.0, -1.0])
    for forbidden in (lambda: x[x > 0], lambda: x.sum().item(), lambda: x.copy_(torch.tensor([1.0, 2.0])), x.nonzero):
        with (watch := Forbidden()):
            forbidden()
        assert watch.seen


class HostReads(TorchFunctionMode):
    """Notes what reads these tensors, or what is computed from them, on the host: on a GPU that waits.

    On a CPU ``.cpu()`` copies nothing, so that no operation shows it; hence the calls themselves.
    """

    NAMES = frozenset(
        {"cpu", "tolist", "item", "numpy", "nonzero", "masked_select", "unique"}
        | {f"__{name}__" for name in ("array", "bool", "int", "index", "float")}
    )

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.watched = {x.untyped_storage().data_ptr(): x for x in tensors}  # kept, so that no address is used again
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        result = func(*args, **kwargs)
        if any(x.untyped_storage().data_ptr() in self.watched for x in given):
            to_host = func.__name__ == "to" and "cpu" in map(str, (*args[1:], *kwargs.values()))
            if to_host or func.__name__ in self.NAMES:
                self.seen.append(func.__name__)
            elif isinstance(result, torch.Tensor):
                self.watched[result.untyped_storage().data_ptr()] = result
        return result


@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "rebuilt"])
def test_metadata_before_a_replay_reads_back_what_its_backend_reads(
    in_place: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Trap 15, where metadata is rebuilt: FlashInfer's builder reads the lengths back, ours reads nothing, and one
    line says that it is so. A backend that refreshes its metadata inside the graph has nothing built.
    """
    pair = write_pair(tmp_path)
    live, lines = start(*pair, 3), []
    built = []
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder as Builder

    from peagle_vllm.v2 import attention

    monkeypatch.setattr(attention.logger, "warning_once", lambda line, *args: lines.append(line % args))
    with emulate(live, COUNTS, in_place=in_place) as seen:
        own_attention, build = live.drafter.attention, Builder.build
        metadata = live.drafter.attention.metadata
        builders = [group.get_metadata_builder() for groups in own_attention.attn_groups for group in groups]
        watch = HostReads([*own_attention.buffers, *own_attention.block_tables.input_block_tables])

        def flashinfers(self: Any, common_prefix_len: int, common: Any, **kwargs: Any) -> Any:
            if self in builders:
                built.append(common.seq_lens.cpu())
            with torch._C.DisableTorchFunction():  # the CPU's own reads
                return build(self, common_prefix_len, common, **kwargs)

        def watched(*args: Any, **kwargs: Any) -> dict[str, Any]:
            with watch:
                return metadata(*args, **kwargs)

        # Undone before emulate restores its own.
        with patch.object(Builder, "build", flashinfers), patch.object(own_attention, "metadata", watched):
            live.run([Request("reads", prompt(9, 5), 12)])
    replays = seen.replayed.total()
    assert replays > 2
    assert watch.seen == ["cpu"] * len(built)
    assert len(built) == seen.steps - (replays if in_place else 0)
    assert len(lines) == (0 if in_place else 1)
    assert all("CPUAttentionMetadataBuilder cannot refresh it" in line for line in lines)


@pytest.mark.parametrize("backend", ["rebuilt", "kernel_blocks"])
def test_nothing_in_captured_metadata_grows_stale(backend: str, tmp_path: Path):
    """Requests of several KV blocks each, captured before any of them came: tables, lengths and schedules are new.

    ``kernel_blocks``: the backend's table is another tensor than the KV cache manager's (docs/architecture.md).
    """
    pair = write_pair(tmp_path)
    asked = [Request(f"{backend}.{i}", prompt(length, i), 20) for i, length in enumerate((70, 9, 100))]
    report, seen = exact(
        start(*pair, 4), pair, asked, in_place=backend != "rebuilt", kernel_blocks=backend == "kernel_blocks"
    )
    assert seen.replayed.total() == sum(seen.depths.values()) > 5
    assert report.rows > 10


def mixed_traffic(name: str) -> list[Request]:
    """Prefills beside decodes from the third step on: in chunks, on shared prefixes, to the very end."""
    shared = prompt(64, 7)
    return [
        Request(f"{name}.decodes", prompt(5, 1), 40),
        Request(f"{name}.chunked", prompt(90, 2), 20, arrives=2),
        Request(f"{name}.prefix", shared + prompt(9, 3), 16, arrives=5),
        Request(f"{name}.hit", shared + prompt(20, 4), 16, arrives=9),
        Request(f"{name}.end", prompt(MAX_MODEL_LEN - 20, 5), 20, arrives=12),
        Request(f"{name}.last", prompt(1, 6), 8, arrives=14),
    ]


MIXED_CASES = {
    # Prefill chunks of up to 32 rows; blocks for two and a half requests, so that some are preempted.
    "chunked": {"token_budget": 32, "kv_blocks": 12, "prefix_caching": True},
    "decodes without FULL": {"token_budget": 32, "mode": "PIECEWISE"},
    "prompts whole": {"token_budget": 512},
}


SMALL = {("chunked", 3), ("chunked", 18), ("decodes without FULL", 7), ("prompts whole", 1)}


@pytest.mark.parametrize(
    ("case", "k"),
    [
        pytest.param(*cell, marks=() if cell in SMALL else pytest.mark.full)
        for cell in itertools.product(MIXED_CASES, FACTORS["k"])
    ],
)
def test_batches_with_a_prefill_draft_from_piecewise_graphs(case: str, k: int, tmp_path: Path):
    """A prefill beside decodes: its draft batch runs in captured pieces, where its rows do not exceed the largest."""
    pair = write_pair(tmp_path, MIXED)
    settings = dict(MIXED_CASES[case])
    mode = settings.pop("mode", "FULL_AND_PIECEWISE")
    live = start(*pair, k, **settings)
    report, seen = exact(live, pair, mixed_traffic(f"{case}{k}"), sizes=(16, 32, 48), mode=mode)
    if case == "prompts whole":
        # max_num_batched_tokens holds 512 rows and more, the largest graph the target's largest, K a request more, and
        # half as many again.
        assert max(seen.sizes) == -(-(max(48, 4 * (k + 1)) + 4 * k) // 16) * 24
        assert seen.eager > 0 or k == 18  # there the largest holds every batch
    else:
        assert seen.pieces.total() > 3
        assert seen.eager == 0
    assert bool(seen.replayed) == (mode != "PIECEWISE")
    assert report.rows > 20
    assert report.near_end > 0 or k < 3  # with fewer, no row can pass the end


@pytest.mark.parametrize("backend", ["in_place", "rebuilt"])
def test_drafts_after_vllm_has_profiled_the_memory_of_graphs(backend: str, tmp_path: Path):
    """Without ``kv_cache_memory_bytes`` vLLM captures twice, first on a KV cache and in a pool that it throws away."""
    pair, k = write_pair(tmp_path, MIXED), 3
    live = start(*pair, k, token_budget=32)
    settings = {"sizes": (16, 32, 48), "in_place": backend == "in_place", "profiled": True}
    report, seen = exact(live, pair, mixed_traffic(f"profiled.{backend}"), **settings)
    assert seen.captured == [(n, 2 * k) for n in reversed(COUNTS)] * 2
    assert seen.replayed.total() > 5 and seen.pieces.total() > 3
    assert seen.eager == 0
    assert report.rows > 20
    assert live.drafter.block_tables is live.runner.block_tables
