"""Which draft batches are captured and which graph serves a batch, against the rule told another way. No GPU."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

SIZES = {"none": [], "few": [1, 2, 4, 8], "irregular": [3, 17, 100]}
SIZES["vLLM's"] = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
GRID = list(itertools.product([1, 8, 64, 1024], [1, 7, 18], [64, 8192], SIZES))


def config(seqs: int, k: int, budget: int, sizes: list[int], schedule=None, adaptive: bool = False) -> SimpleNamespace:
    """The part of a VllmConfig that the rule reads."""
    spec = SimpleNamespace(num_speculative_tokens=k, parallel_drafting=True, enable_adaptive_verification=adaptive)
    spec.num_speculative_tokens_per_batch_size, spec.draft_model_config = schedule, SimpleNamespace()
    spec.enforce_eager = spec.kv_cache_dtype = None
    largest = max(sizes, default=0)
    return SimpleNamespace(
        num_speculative_tokens=k,
        speculative_config=spec,
        use_v2_model_runner=True,
        scheduler_config=SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=budget),
        cache_config=SimpleNamespace(cache_dtype="auto", kv_cache_layout="HND"),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=largest),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        model_config=SimpleNamespace(max_model_len=4096),
    )


@pytest.fixture
def graphs():
    """Makes the graphs of a target with FULL decode graphs and PIECEWISE ones.

    Imported late: V2's arm collects this file too, and must import vLLM in its own way.
    """
    from vllm.config.compilation import CUDAGraphMode

    from peagle_vllm.v2.cudagraph import draft_graphs

    return lambda vllm_config, mode="FULL_AND_PIECEWISE": draft_graphs(vllm_config, CUDAGraphMode[mode])


@pytest.mark.parametrize(("max_num_seqs", "k", "budget", "sizes"), GRID, ids=str)
def test_decode_graphs_follow_the_request_counts(graphs, max_num_seqs: int, k: int, budget: int, sizes: str):
    """A ceiling in the target's rows would drop the drafter's largest batches.

    What is asked of the shapes, batch by batch: a graph of its own where the target has one, little padding where it
    has none, up to the last request that max_num_batched_tokens holds, and not one graph that no batch would use.
    """
    shapes = graphs(config(max_num_seqs, k, budget, SIZES[sizes]))
    counts, limit = [n for n, _ in shapes.decode], min(max_num_seqs, budget // (2 * k))
    if not (SIZES[sizes] and limit):
        assert not counts
        return
    assert shapes.max_staging_rows == limit * (k + 1)
    assert shapes.decode_graph(limit + 1, k) is None
    assert shapes.decode_graph(1, k + 1) is None
    named = {min(-(-size // (1 + k)), limit) for size in SIZES[sizes]}  # the target's own
    for n in range(1, limit + 1):
        got, depth = shapes.decode_graph(n, k)
        assert (got, depth) == (min(count for count in counts if count >= n), k)
        if n <= max(named):
            assert got == min(count for count in named if count >= n)
        else:
            assert got - n < max(8, n / 8)


@pytest.mark.parametrize(
    ("max_num_seqs", "budget", "largest", "reach"),
    [
        (1024, 8192, 512, 8192),  # vLLM's defaults on an H200: a saturated scheduler makes 8,192 rows
        (1024, 16_384, 1024, 16_384),  # on a B200
        (1024, 100_000, 4096, 21_504),  # the published command: 1,024 requests decode in 14,336
        (256, 8192, 512, 5376),  # 256 requests decode in 3,584
        (8, 8192, 512, 864),
    ],
)
def test_mixed_graphs_have_room_for_prefills_beside_a_full_batch(graphs, max_num_seqs, budget, largest, reach):
    sizes = [*SIZES["vLLM's"], *range(528, largest + 1, 16)]
    shapes = graphs(config(max_num_seqs, 7, budget, sizes))
    assert shapes.mixed[-1] == shapes.max_rows == reach
    assert set(shapes.mixed) >= {size for size in sizes if size <= budget}
    assert all(after - size <= max(16, size / 8) for size, after in itertools.pairwise(shapes.mixed))


def test_adaptive_verification_has_graphs_as_far_as_the_target(graphs):
    """Its target graphs hold requests of one row and more, so 256 requests fit below 512 rows: drafts must follow."""
    shapes = graphs(config(256, 7, 8192, SIZES["vLLM's"], adaptive=True))
    assert {n for n, _ in shapes.decode} == {n for n in SIZES["vLLM's"] if n <= 256}
    assert graphs(config(256, 7, 2048, SIZES["vLLM's"], adaptive=True)).max_staging_rows == 2048 // 14 * 8


def test_a_schedule_captures_what_its_batches_ask_for(graphs):
    """K = 5 for up to 4 requests, 2 for up to 8, none beyond: no graph of 16 requests at K = 5."""
    shapes = graphs(config(16, 5, 2048, SIZES["vLLM's"], [(1, 4, 5), (5, 8, 2), (9, 16, 0)]))
    widest = {k: max(n for n, depth in shapes.decode if depth == k) for _, k in shapes.decode}
    assert widest == {5: 4, 2: 8, 0: 16}
    assert shapes.max_rows == max(shapes.mixed[-1], 4 * 10, 8 * 4, 16 * 1)
    assert shapes.decode_graph(3, 5) == (3, 5)
    assert shapes.decode_graph(2, 2) == (2, 5)  # 20 rows, fewer than the 24 of six requests
    assert shapes.decode_graph(3, 2) == (6, 2)
    assert shapes.decode_graph(6, 2) == (6, 2)
    assert shapes.decode_graph(16, 0) == (16, 0)
    assert shapes.decode_graph(16, 2) is None
    step = {"max_k": 5, "max_num_tokens": 2048, "max_model_len": 4096}
    for n, k, verified in itertools.product(range(1, 17), (5, 2, 0), range(6)):
        batch, *_ = shapes.dispatch(np.full(n, verified + 1, dtype=np.int32), n * (verified + 1), k, **step)
        assert batch.staging_length > verified and batch.samples_per_req >= max(k, 1) and batch.num_reqs_padded >= n
        assert batch.static_length == batch.staging_length - 1 + batch.samples_per_req


def test_the_drafter_has_the_kinds_of_graph_that_the_target_has(graphs):
    kinds = {
        "FULL_AND_PIECEWISE": (True, True),
        "FULL_DECODE_ONLY": (True, False),
        "PIECEWISE": (False, True),
        "FULL": (True, False),  # its model has no pieces
        "NONE": (False, False),
    }
    for mode, kind in kinds.items():
        shapes = graphs(config(8, 3, 2048, SIZES["vLLM's"]), mode)
        assert (bool(shapes.decode), bool(shapes.mixed)) == kind
        assert shapes.cudagraph_mode.name == (mode if mode != "FULL" else "FULL_DECODE_ONLY")
    eager = config(8, 3, 2048, SIZES["vLLM's"])
    eager.speculative_config.enforce_eager = True  # of the drafter alone
    assert not graphs(eager).decode and not graphs(eager).mixed


@pytest.mark.parametrize(
    ("scheduled", "changes", "length", "rows", "graph"),
    [
        ([8, 8, 8], {}, 14, 42, (3, 42)),
        ([8, 1, 8], {}, 14, 42, (3, 42)),  # unequal verify lengths
        ([8] * 65, {}, 14, 65 * 14, (72, 72 * 14)),  # padded
        ([8, 8, 8], {"num_k": 0}, 14, 42, (3, 42)),  # no shape of its own: 8 rows would do
        ([1, 1, 1], {}, 14, 42, (3, 42)),  # nor have seven
        ([2] * 300, {"num_k": 1}, 2, 600, (None, 608)),  # one verified draft and a new one
        ([2] * 299 + [8], {"num_k": 1}, 0, 606, (None, 608)),  # not padded to the widest
        ([8, 9, 8], {}, 0, 14 + 15 + 14, (None, 48)),  # a prefill chunk
        ([600, 8], {}, 0, 606 + 14, (None, 640)),
        ([8] * 600, {}, 0, 8192, None),  # 8,400 rows would be more than max_num_batched_tokens
        ([6000, 8], {}, 0, 4096 + 14, (None, 4160)),  # no request has more rows than max_model_len
        ([3000, 2500], {}, 0, 3006 + 2506, None),
        ([8, 8], {"max_model_len": 13}, 0, 26, (None, 32)),  # static rows would not fit into max_model_len
        ([100], {"max_model_len": 64}, 0, 64, (None, 64)),
    ],
)
def test_how_a_batch_drafts(graphs, scheduled: list[int], changes: dict, length: int, rows: int, graph: Any):
    """A step of these verified rows, which drafts 7 tokens a request, or ``num_k`` of them.

    ``graph`` has so many requests, None where it is PIECEWISE, and so many rows.
    """
    step = {"num_k": 7, "max_k": 7, "max_num_tokens": 8192, "max_model_len": 4096} | changes
    shapes, verified = graphs(config(256, 7, 8192, SIZES["vLLM's"])), np.array(scheduled, dtype=np.int32)
    batch, starts, chosen = shapes.dispatch(verified, sum(scheduled), **step)
    assert (batch.static_length, starts[-1]) == (length, rows)
    assert batch.staging_length == ((8 if graph and graph[0] else max(scheduled)) if length else 0)
    assert len(starts) == len(scheduled) + 1
    assert (chosen and (chosen.num_reqs, chosen.num_tokens)) == graph
    num_reqs, num_rows = graph or (None, rows)
    assert (batch.num_reqs_padded, batch.num_rows) == (num_reqs or len(scheduled), num_rows)
    assert chosen is None or chosen.uniform_token_count == (num_reqs and length)


def test_attention_builders_see_the_drafters_own_batches():
    """2K rows are a decode. Buffers sized by the largest captured batch hold a draft batch."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.attention.backend import max_decode_query_len

    from peagle_vllm.v2.attention import draft_attention_config

    original = config(256, 7, 8192, SIZES["vLLM's"])
    original.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    seen = draft_attention_config(original)
    assert max_decode_query_len(seen) == 14
    assert seen.compilation_config.max_cudagraph_capture_size == 14 * 256
    assert max_decode_query_len(original) == 8
    assert original.compilation_config.max_cudagraph_capture_size == 512
    original.speculative_config.kv_cache_dtype = "fp8"
    cache = draft_attention_config(original).cache_config
    assert (cache.cache_dtype, cache.kv_cache_layout, original.cache_config.cache_dtype) == ("fp8", "HND", "auto")
