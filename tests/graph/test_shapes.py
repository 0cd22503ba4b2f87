"""Which draft batches are captured and which graph serves a batch, against the rule told another way. No GPU."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

SIZES = {
    "none": [],
    "few": [1, 2, 4, 8],
    "vLLM's": [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)],
    "odd": [3, 17, 100],
}
GRID = list(itertools.product([1, 8, 64, 256], [1, 3, 7], [64, 2048], SIZES))


def config(
    max_num_seqs: int, k: int, budget: int, sizes: list[int], schedule=None, adaptive: bool = False
) -> SimpleNamespace:
    """The part of a VllmConfig that the rule reads."""
    spec = SimpleNamespace(
        num_speculative_tokens=k,
        num_speculative_tokens_per_batch_size=schedule,
        uses_dynamic_speculative_decoding=lambda: schedule is not None,
        parallel_drafting=True,
        enable_adaptive_verification=adaptive,
    )
    return SimpleNamespace(
        num_speculative_tokens=k,
        speculative_config=spec,
        use_v2_model_runner=True,
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes, default=0)
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
    )


@pytest.fixture(scope="module")
def rule() -> Any:
    """The module under test, imported late: V2's arm collects this file too, and must import vLLM in its own way."""
    from peagle_vllm.v2 import cudagraph

    return cudagraph


FULL, NONE = "FULL", "NONE"


@pytest.fixture
def manager(rule: Any, monkeypatch: pytest.MonkeyPatch):
    """Makes a manager that believes it has captured everything."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils

    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: group)
    monkeypatch.setattr(cudagraph_utils, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None))
    monkeypatch.setattr(cudagraph_utils, "is_breakable_cudagraph_enabled", lambda: False)

    def make(vllm_config: SimpleNamespace) -> Any:
        made = rule.DraftCudaGraphManager(vllm_config, torch.device("cpu"), CUDAGraphMode.FULL_DECODE_ONLY)
        made._graphs_captured = True
        return made

    return make


def told_another_way(max_num_seqs: int, k: int, budget: int, sizes: list[int], schedule=None) -> set[tuple[int, int]]:
    """Walk over every request count and ask whether the target has a graph that a batch of it would fill."""
    wanted = set()
    for depth in {entry[2] for entry in schedule} if schedule else {k}:
        for n in range(1, max_num_seqs + 1):
            rows = n * (1 + depth)
            captured = any(rows - (1 + depth) < size <= rows for size in sizes) and rows <= max(sizes)
            length = k + max(depth, 1)
            if captured and n * length <= budget:
                wanted.add((n, length))
    return wanted


@pytest.mark.parametrize(("max_num_seqs", "k", "budget", "sizes"), GRID, ids=str)
def test_shapes_are_the_rule(rule, max_num_seqs: int, k: int, budget: int, sizes: str):
    """Trap 1: a ceiling in the target's rows would drop the drafter's largest batches."""
    arguments = max_num_seqs, k, budget, SIZES[sizes]
    assert set(rule.draft_shapes(config(*arguments))) == told_another_way(*arguments)


def test_every_target_graph_has_a_draft_graph_beyond_the_targets_ceiling(rule):
    """512 rows hold 64 requests that verify 8; their drafts take 896."""
    shapes = rule.draft_shapes(config(256, 7, 8192, SIZES["vLLM's"]))
    assert max(shapes) == (64, 14)
    assert 64 * 14 > 512


def test_adaptive_verification_has_graphs_as_far_as_the_target(rule):
    """Its target graphs hold requests of one row and more, so 256 requests fit below 512 rows: drafts must follow."""
    shapes = rule.draft_shapes(config(256, 7, 8192, SIZES["vLLM's"], adaptive=True))
    assert {n for n, _ in shapes} == {n for n in SIZES["vLLM's"] if n <= 256}
    assert max(n for n, _ in rule.draft_shapes(config(256, 7, 2048, SIZES["vLLM's"], adaptive=True))) * 14 <= 2048


def test_a_schedule_has_a_shape_for_each_depth(rule):
    schedule = [(1, 4, 5), (5, 8, 2), (9, 16, 0)]
    vllm_config = config(16, 5, 2048, SIZES["vLLM's"], schedule)
    assert rule.asked_depths(vllm_config) == [0, 2, 5]
    assert set(rule.draft_shapes(vllm_config)) == told_another_way(16, 5, 2048, SIZES["vLLM's"], schedule)
    assert {length for _, length in rule.draft_shapes(vllm_config)} == {10, 7, 6}


@pytest.mark.parametrize(("max_num_seqs", "k", "budget", "sizes"), GRID, ids=str)
def test_a_batch_gets_the_least_graph_that_holds_it(manager, max_num_seqs: int, k: int, budget: int, sizes: str):
    vllm_config = config(max_num_seqs, k, budget, SIZES[sizes])
    captured = told_another_way(max_num_seqs, k, budget, SIZES[sizes])
    made = manager(vllm_config)
    for depth in range(k + 1):
        length = made.static_length(depth)
        assert length == (2 * k if captured else k + max(depth, 1))
    for num_reqs in range(1, max_num_seqs + 1):
        desc = made.dispatch(num_reqs, num_reqs * 2 * k, 2 * k, 0)
        enough = [n for n, _ in captured if n >= num_reqs]
        if enough:
            assert (desc.cg_mode.name, desc.num_reqs, desc.num_tokens) == (
                FULL, min(enough), min(enough) * 2 * k
            )  # fmt: skip
        else:
            assert (desc.cg_mode.name, desc.num_reqs, desc.num_tokens) == (NONE, num_reqs, num_reqs * 2 * k)


def test_a_ragged_batch_gets_no_graph(manager):
    made = manager(config(8, 3, 2048, SIZES["vLLM's"]))
    assert made.dispatch(2, 12, None, 0).cg_mode.name == NONE


def test_a_step_of_a_schedule_gets_its_own_width(manager):
    made = manager(config(16, 5, 2048, SIZES["vLLM's"], [(1, 4, 5), (5, 16, 2)]))
    assert [made.static_length(k) for k in range(6)] == [7, 7, 7, 10, 10, 10]
    assert made.dispatch(3, 21, 7, 0).num_tokens == 7 * 3
    assert made.dispatch(3, 30, 10, 0).num_tokens == 10 * 3


def test_the_largest_shape_is_captured_first(manager):
    """Later graphs then fit into the memory of the first."""
    made = manager(config(64, 7, 8192, SIZES["vLLM's"]))
    rows = [desc.num_tokens for descs in made._capture_descs.values() for desc in descs]
    assert rows == sorted(rows, reverse=True)
    assert made.needs_capture()


def test_attention_builders_see_the_drafters_own_batches(rule):
    """Trap 2: 2K rows are a decode. Trap 1: buffers sized by the largest captured batch hold a draft batch."""
    from vllm.v1.attention.backend import max_decode_query_len

    original = config(256, 7, 8192, SIZES["vLLM's"])
    seen = rule.draft_attention_config(original)
    assert max_decode_query_len(seen) == 14
    assert seen.compilation_config.max_cudagraph_capture_size == 14 * 64
    assert max_decode_query_len(original) == 8
    assert original.compilation_config.max_cudagraph_capture_size == 512
