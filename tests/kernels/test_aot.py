"""The kernels compile for sm_90 and sm_100 without a GPU, spill no registers, and copy rows 128 bits at a time.

And none of them compiles another variant for another K, batch or row count of a server. The product's own launch code
makes each call; a stand-in driver turns the launch into a compilation, so types, specialisation and compile-time
constants are those of a real launch and cannot drift from the kernel.
"""

import importlib
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from peagle_kernels.batch import allocate_buffers
from peagle_kernels.gather_hidden import gather_hidden
from peagle_kernels.lookup_drafts import OneHot, lookup_drafts
from peagle_kernels.prepare_inputs import prepare_inputs
from peagle_kernels.select_candidates import Drawing, select_candidates
from tests.kernels import test_select_candidates as cases
from tests.support.batches import MASK_TOKEN, Request, build
from tools import interpreter

on_each = pytest.mark.parametrize("arch", [90, 100], ids=lambda arch: f"sm_{arch}")


class AheadOfTime:
    """In place of a kernel: ``kernel[grid](...)`` compiles and keeps the result."""

    def __init__(self, kernel: Any):
        self.kernel, self.compiled = kernel, []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.compiled.append(self.kernel.warmup(*args, grid=grid, **kwargs))

        return launch


def no_gpu(arch: int) -> Any:
    """What the compiler reads of a driver. The device number is the architecture, so each has its own cache."""
    return SimpleNamespace(
        get_current_device=lambda: arch,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
    )


@contextmanager
def ahead_of_time(launch: Callable[..., None], arch: int) -> Iterator[list[AheadOfTime]]:
    """Meanwhile every kernel in the module of ``launch`` is compiled for ``arch``; yields them."""
    module = importlib.import_module(launch.__module__)
    names = [name for name in vars(module) if name.startswith("_") and name.endswith("_kernel")]
    kernels = {name: AheadOfTime(getattr(module, name)) for name in names}
    on_gpu = patch.object(driver, "_active", no_gpu(arch)), patch("peagle_kernels.dispatch.INTERPRETED", True)
    with on_gpu[0], on_gpu[1], patch.multiple(module, **kernels):
        yield list(kernels.values())


def stores_of(arch: int, launch: Callable[..., None], *args: Any, **kwargs: Any) -> list[str]:
    """Each instruction, such as STG.E.128, that stores to global memory where ``launch(...)`` runs on ``arch``."""
    with ahead_of_time(launch, arch) as kernels:
        launch(*args, **kwargs)
    compiled = [once.asm for kernel in kernels for once in kernel.compiled]
    assert compiled and not any(spill_bytes(asm["ptx"], arch) for asm in compiled)
    return re.findall(r"\bSTG\S*", "".join(asm["sass"] for asm in compiled))


def spill_bytes(ptx: str, arch: int) -> int:
    """Bytes spilled to local memory, stores and loads, as the assembler reports when it is run again."""
    command = [get_ptxas(arch).path, "-v", f"--gpu-name={sm_arch_from_capability(arch)}", "-", "-o", os.devnull]
    report = subprocess.run(command, input=ptx, check=True, capture_output=True, text=True).stderr
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    assert len(spills) == 2, report
    return sum(map(int, spills))


@on_each
@pytest.mark.parametrize("static", [True, False], ids=["static", "ragged"])
@pytest.mark.parametrize(
    ("num_groups", "num_aux", "dtype", "idx_dtype", "width"),
    [
        (1, 0, torch.bfloat16, torch.int32, 2880),
        (1, 3, torch.bfloat16, torch.int32, 2880),
        (2, 5, torch.float32, torch.int64, 2880),
        (0, 1, torch.bfloat16, torch.int64, 2880),  # while memory is profiled
        (1, 3, torch.bfloat16, torch.int32, 2056),  # a multiple of 8 only
    ],
    ids=str,
)
def test_prepare_inputs(arch, static, num_groups, num_aux, dtype, idx_dtype, width):
    shape = {"k": 3, "max_k": 3, "static": static, "max_model_len": 64, "dtype": dtype}
    shape |= {"block_sizes": [16] * num_groups, "widths": [width] * num_aux}
    case = build([Request(10, 4, 2), Request(5, 4, 0)], **shape)
    target = case.target._replace(idx_mapping=case.target.idx_mapping.to(idx_dtype))
    args = (target, case.aux, case.groups, case.batch, case.buffers(extra=5))
    stores = stores_of(arch, prepare_inputs, *args, **case.constants)
    assert any(".128" in store for store in stores) == (num_aux > 0)


@on_each
@pytest.mark.parametrize("width", [2880, 2056, 129], ids=["real", "multiple of 8", "no multiple of 8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gather_hidden(arch, dtype, width):
    rows, row_map = torch.empty(4, width, dtype=dtype), torch.zeros(4, dtype=torch.int32)
    stores = stores_of(arch, gather_hidden, rows, rows.clone(), rows[0].clone(), row_map)
    assert width % 8 or all(".128" in store for store in stores)


@on_each
@pytest.mark.parametrize(
    ("rank", "num_candidates", "gated", "reduced", "drawn"),
    [
        (64, 16, True, True, True),
        (64, 16, False, True, False),
        (256, 32, True, False, True),
        (1, 64, False, True, True),  # a head without a selector
    ],
)
def test_select_candidates(arch, rank, num_candidates, gated, reduced, drawn):
    """With vLLM's own draw where tokens are drawn."""
    candidates, *parts = cases.case(3, 2, num_candidates, rank, 3, gated=gated, reduced=reduced)
    drawing, numbers = None, torch.zeros(6, dtype=torch.int64)
    if drawn:
        interpreter.enable()  # vLLM imports no Triton where it sees no device
        from peagle_vllm.v2.drawing import draw

        state = cases.state(2, 3, num_candidates, cases.VOCAB, dtype=torch.bfloat16)
        drawing = Drawing(draw, numbers, numbers, *state, use_fp64=False)
    out, scores = cases.strided(2, 3), torch.empty_like(candidates.logits)
    assert stores_of(arch, select_candidates, out, candidates, *parts, scores, drawing)


@on_each
@pytest.mark.parametrize(
    ("q", "cached"), [(None, False), (torch.float32, True), (torch.float32, False), (torch.bfloat16, False)], ids=str
)
def test_lookup_drafts(arch, q, cached):
    """Greedy drafts, then q whole, or by cached entries."""
    drafts, token_ids = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 131_073, dtype=torch.int32)
    numbers, one_hot = torch.zeros(2, dtype=torch.int64), None
    if q:
        cached_ids = torch.zeros(2, 3, 16, dtype=torch.int64) if cached else None
        one_hot = OneHot(torch.zeros(2, 3, 64, dtype=q), numbers, 0.0, 1.0, cached_ids)
    args = (drafts, token_ids, numbers, numbers, 2, 64, one_hot)
    assert stores_of(arch, lookup_drafts, *args)


DEPTHS = (1, 2, 7, 16)  # 1 and multiples of 16 are what Triton specialises integers on
MAX_NUM_REQS, WIDTH = 32, 64
RANK, VOCAB = 16, 100
NUM_CANDIDATES = 8


def num_variants(launch: Callable[..., None], calls: Iterable[tuple[Any, ...]], **constants: int) -> int:
    """How many variants of its kernels ``launch(*args)`` needs for all these ``args``; none is compiled."""
    keys = set()
    with (
        ahead_of_time(launch, 90) as kernels,
        patch.object(JITFunction, "_do_compile", lambda self, key, *args: keys.add(key)),
        ExitStack() as caches,
    ):
        for kernel in kernels:
            caches.enter_context(patch.dict(kernel.kernel.device_caches, clear=True))
        for args in calls:
            launch(*args, **constants)
    return len(keys)


def steps_of(max_k: int) -> Iterator[tuple[int, int]]:
    """K and number of requests of every step that a server of this K can have, with a schedule."""
    return product([k for k in DEPTHS if k <= max_k], [1, 2, 15, 16, 32])


def of_runner(drafts: torch.Tensor, v1: bool) -> torch.Tensor:
    """V2 keeps the drafts of the largest K; V1's are of the step's own, whose stride differs."""
    return drafts.contiguous() if v1 else drafts


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

    calls = (call(k, n, static) for k, n in [(0, 1), *steps_of(max_k)] for static in (True, False))
    constants = {"max_model_len": 64, "parallel_drafting_token_id": MASK_TOKEN}
    assert num_variants(prepare_inputs, calls, **constants) == 2


def test_a_server_compiles_gather_hidden_once():
    out, row_map = torch.zeros(128, WIDTH), torch.zeros(128, dtype=torch.int32)
    combined = torch.zeros(1 + 128, WIDTH)  # m, then captured rows
    calls = ((out[:rows], combined[1:], combined[0], row_map[:rows]) for rows in (1, 2, 15, 16, 128))
    assert num_variants(gather_hidden, calls) == 1


@pytest.mark.parametrize("max_k", DEPTHS)
@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
def test_a_server_compiles_select_candidates_once(drawn: bool, max_k: int):
    """And the next server nothing more, however many positions its selector has scales for."""
    drafts = torch.zeros(MAX_NUM_REQS, max_k, dtype=torch.int64)
    state = cases.state(MAX_NUM_REQS, max_k, NUM_CANDIDATES, cases.VOCAB)

    def call(k: int, num_reqs: int, positions: int, v1: bool) -> tuple[Any, ...]:
        candidates, *parts = cases.case(k, num_reqs, NUM_CANDIDATES, RANK, positions, reduced=True)
        numbers = torch.zeros(num_reqs * k, dtype=torch.int64)
        drawing = Drawing(cases.draw_by_its_arguments, numbers, numbers, *state, use_fp64=False)
        out, scores = of_runner(drafts[:num_reqs, :k], v1), torch.empty_like(candidates.logits)
        return out, candidates, *parts, scores, drawing if drawn else None

    calls = (call(*step, *other) for step in steps_of(max_k) for other in product((1, 2, 17), (False, True)))
    assert num_variants(select_candidates, calls) == 1


@pytest.mark.parametrize("max_k", DEPTHS)
@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
def test_a_server_compiles_lookup_drafts_once(drawn: bool, max_k: int):
    drafts, numbers = torch.zeros(MAX_NUM_REQS, max_k, dtype=torch.int64), torch.zeros(512, dtype=torch.int64)
    token_ids, q = torch.zeros(MAX_NUM_REQS, 5000, dtype=torch.int32), torch.zeros(MAX_NUM_REQS, max_k, VOCAB)

    def call(k: int, num_reqs: int, v1: bool) -> tuple[Any, ...]:
        first = numbers[: num_reqs * k : k]
        one_hot = OneHot(of_runner(q[:num_reqs, :k], v1), first, 0.0, 1.0, None) if drawn else None
        return of_runner(drafts[:num_reqs, :k], v1), token_ids, first, first, 2, VOCAB, one_hot

    calls = (call(*step, v1) for step in steps_of(max_k) for v1 in (False, True))
    assert num_variants(lookup_drafts, calls) == 2  # one of each kernel
