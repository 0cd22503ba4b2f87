"""The kernels compile for sm_90 and sm_100 without a GPU, spill no registers, and copy rows 128 bits at a time.

And none of them compiles another variant for another K, batch or row count of a server.
"""

import importlib
import os
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from peagle_kernels import (
    Candidates,
    CandidateSelector,
    Drawing,
    OneHot,
    allocate_buffers,
    gather_hidden_triton,
    limit_logits_triton,
    lookup_drafts_triton,
    prepare_inputs_triton,
    select_candidates_triton,
)
from tests.kernels.test_select_candidates import draw_by_its_arguments
from tests.support import compiled
from tests.support.batches import MASK_TOKEN, Request, build

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter never compiles: run without TRITON_INTERPRET"
)
on_each = pytest.mark.parametrize("arch", compiled.ARCHITECTURES, ids=lambda arch: f"sm_{arch}")


@on_each
@pytest.mark.parametrize("static", [True, False], ids=["static", "ragged"])
@pytest.mark.parametrize(
    ("num_groups", "num_aux", "dtype", "idx_dtype", "width"),
    [
        *((*shape, compiled.WIDTH) for shape in compiled.PREPARE_SHAPES),
        (*compiled.PREPARE_SHAPES[1], compiled.WIDTHS["multiple of 8"]),
    ],
    ids=str,
)
def test_prepare_inputs(arch, static, num_groups, num_aux, dtype, idx_dtype, width):
    assembled = compiled.prepare_inputs(arch, static, num_groups, num_aux, dtype, idx_dtype, width)
    assert assembled.spill_bytes == 0
    # Whole rows only: the widest accesses copy, and none is narrower than an int32.
    assert ("128" in assembled.stores) == ("128" in assembled.loads) == (num_aux > 0)
    assert not {"8", "16"} & {*assembled.loads, *assembled.stores}


@on_each
@pytest.mark.parametrize("width", compiled.WIDTHS.values(), ids=compiled.WIDTHS)
@pytest.mark.parametrize("dtype", compiled.DTYPES, ids=str)
def test_gather_hidden(arch, dtype, width):
    assembled = compiled.gather_hidden(arch, dtype, width)
    assert assembled.spill_bytes == 0
    if width % 8 == 0:
        assert set(assembled.stores) == {"128"}
        assert assembled.loads.pop("32") == 1  # the row map
        assert set(assembled.loads) == {"128"}


@on_each
@pytest.mark.parametrize("shape", compiled.SELECTOR_SHAPES, ids=str)
def test_select_candidates(arch, shape):
    assembled = compiled.select_candidates(arch, *shape)
    assert assembled.spill_bytes == 0
    assert "128" in assembled.loads  # rows of the tables


@on_each
@pytest.mark.parametrize(
    ("q", "cached"), [(None, False), (torch.float32, True), (torch.float32, False), (torch.bfloat16, False)], ids=str
)
def test_lookup_drafts(arch, q, cached):
    assert compiled.lookup_drafts(arch, q, cached).spill_bytes == 0


@on_each
@pytest.mark.parametrize("dtype", compiled.DTYPES, ids=str)
def test_limit_logits(arch, dtype):
    assert compiled.limit_logits(arch, dtype).spill_bytes == 0


DEPTHS = (1, 2, 7, 16)  # 1 and multiples of 16 are what Triton specialises integers on
MAX_NUM_REQS, WIDTH, RANK, VOCAB, NUM_CANDIDATES = 32, 64, 16, 100, 8
REQUEST_COUNTS = (1, 2, 15, 16, 32)


def num_variants(module: str, name: str, launch: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> int:
    """How many variants of this kernel ``launch(*args)`` needs for all these ``args``; none is compiled."""
    place = importlib.import_module(f"peagle_kernels.{module}")
    kernel, keys, launches = compiled.AheadOfTime(getattr(place, name)), set(), 0
    with (
        patch.object(driver, "_active", compiled.no_gpu(90)),
        patch.object(place, name, kernel),
        patch.object(JITFunction, "_do_compile", lambda self, key, *args: keys.add(key)),
        patch.dict(kernel.kernel.device_caches, clear=True),
    ):
        for args in calls:
            launch(*args)
            launches += 1
    assert launches == len(kernel.compiled) > 0
    return len(keys)


def depths_of(max_k: int) -> tuple[int, ...]:
    """K of every step that a server of this K can have, with a schedule."""
    return tuple(k for k in DEPTHS if k <= max_k)


@pytest.mark.parametrize("max_k", DEPTHS)
def test_a_server_compiles_prepare_inputs_once_for_each_layout(max_k: int):
    out = allocate_buffers(
        max_rows=MAX_NUM_REQS * 2 * max_k + 7,
        max_num_reqs=MAX_NUM_REQS + 3,  # a row of request state each, too
        max_speculative_tokens=max_k,
        staging=torch.zeros(1 + MAX_NUM_REQS * (max_k + 1), 3 * WIDTH)[1:],
        slot_mappings=torch.zeros(2, MAX_NUM_REQS * 2 * max_k + 7, dtype=torch.int64),
    )

    def call(k: int, num_reqs: int, static: bool) -> tuple[Any, ...]:
        asked, blocks = [Request(3, 1 + k // 2, 0)] * num_reqs, {"block_sizes": [16, 32], "widths": [WIDTH] * 3}
        case = build(asked, k=k, max_k=max_k, static=static, max_model_len=64, **blocks)
        return case.target, case.aux, case.groups, case.batch, out

    steps = product((0, *depths_of(max_k)), REQUEST_COUNTS, (True, False))
    calls = (call(*step) for step in steps)
    launch = partial(prepare_inputs_triton, max_model_len=64, parallel_drafting_token_id=MASK_TOKEN)
    assert num_variants("prepare_inputs_kernel", "_prepare_inputs_kernel", launch, calls) == 2


def test_a_server_compiles_gather_hidden_once():
    out, row_map = torch.zeros(128, WIDTH), torch.zeros(128, dtype=torch.int32)
    combined = torch.zeros(1 + 128, WIDTH)  # m, then captured rows
    calls = ((out[:rows], combined[1:], combined[0], row_map[:rows]) for rows in (1, 2, 15, 16, 128))
    assert num_variants("gather_hidden", "_gather_hidden_kernel", gather_hidden_triton, calls) == 1


@pytest.mark.parametrize("max_k", DEPTHS)
@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
def test_a_server_compiles_select_candidates_once(drawn: bool, max_k: int):
    """And the next server nothing more, however many positions its selector has scales for."""
    samples = MAX_NUM_REQS * max_k
    drafts, offsets = (torch.zeros(*shape, dtype=torch.int64) for shape in ((MAX_NUM_REQS, max_k), (VOCAB,)))
    ids, scores = torch.zeros(samples, NUM_CANDIDATES, dtype=torch.int64), torch.zeros(samples, NUM_CANDIDATES)
    gates, table = torch.zeros(samples, RANK), torch.zeros(VOCAB, RANK)
    numbers = torch.zeros(samples, dtype=torch.int64)
    ones, zeros = torch.ones(MAX_NUM_REQS), torch.zeros(MAX_NUM_REQS, dtype=torch.int64)
    state = ones, zeros, zeros.int(), ones
    q, cached = torch.zeros(MAX_NUM_REQS, max_k, VOCAB), ids.view(MAX_NUM_REQS, max_k, -1)

    def call(k: int, num_reqs: int, positions: int) -> tuple[Any, ...]:
        rows, scale = slice(0, num_reqs * k), torch.ones(positions)
        selector = CandidateSelector(table, table, None, scale, scale, NUM_CANDIDATES)
        candidates = Candidates(ids[rows], scores[rows], gates[rows], numbers.int(), numbers[rows])
        drawing = Drawing(draw_by_its_arguments, numbers[rows], numbers[rows], *state, q, cached, use_fp64=False)
        return drafts[:num_reqs, :k], candidates, selector, offsets, scores[rows], drawing if drawn else None

    calls = (call(*step) for step in product(depths_of(max_k), REQUEST_COUNTS, (1, 2, 17)))
    assert num_variants("select_candidates", "_select_candidates_kernel", select_candidates_triton, calls) == 1


@pytest.mark.parametrize("max_k", DEPTHS)
@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
def test_a_server_compiles_lookup_drafts_once(drawn: bool, max_k: int):
    drafts, numbers = torch.zeros(MAX_NUM_REQS, max_k, dtype=torch.int64), torch.zeros(512, dtype=torch.int64)
    token_ids, q = torch.zeros(MAX_NUM_REQS, 64, dtype=torch.int32), torch.zeros(MAX_NUM_REQS, max_k, VOCAB)

    def call(k: int, num_reqs: int) -> tuple[Any, ...]:
        first = numbers[: num_reqs * k : k]
        return (
            drafts[:num_reqs, :k],
            token_ids,
            first,
            first,
            2,
            VOCAB,
            OneHot(q, first, 0.0, 1.0, None) if drawn else None,
        )

    calls = (call(*step) for step in product(depths_of(max_k), REQUEST_COUNTS))
    assert num_variants("lookup_drafts", "_lookup_drafts_kernel", lookup_drafts_triton, calls) == 1


def test_a_server_compiles_limit_logits_once():
    logits, numbers = torch.zeros(512, VOCAB), torch.zeros(512, dtype=torch.int64)
    state = torch.ones(MAX_NUM_REQS), torch.ones(MAX_NUM_REQS, dtype=torch.int32), torch.ones(MAX_NUM_REQS)
    calls = ((logits[:rows], numbers[:rows], *state) for rows in (1, 2, 15, 16, 32, 512))
    assert num_variants("limit_logits", "_limit_logits_kernel", limit_logits_triton, calls) == 1
