"""Kernels of ``peagle_kernels``, compiled for GPUs that are not there, and what the assembler made of them.

The product's own launch code makes the call; a stand-in driver turns the launch into a compilation, so types,
specialisation and compile-time constants are those of a real launch and cannot drift from the kernel.
"""

import importlib
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.runtime.driver import driver

from peagle_kernels import (
    Candidates,
    CandidateSelector,
    Drawing,
    OneHot,
    gather_hidden_triton,
    limit_logits_triton,
    lookup_drafts_triton,
    prepare_inputs_triton,
    select_candidates_triton,
)
from tests.support import interpreter
from tests.support.batches import Request, build

ARCHITECTURES = (90, 100)
# (KV groups, captured hidden states, dtype, dtype of idx_mapping)
PREPARE_SHAPES = [
    (1, 0, torch.bfloat16, torch.int32),
    (1, 3, torch.bfloat16, torch.int32),
    (1, 5, torch.float32, torch.int64),
    (2, 1, torch.bfloat16, torch.int64),
    (2, 3, torch.float32, torch.int32),
    (2, 5, torch.bfloat16, torch.int32),
    (0, 3, torch.bfloat16, torch.int64),  # while memory is profiled
]
WIDTH = 2880
# A real head's width, one that is a multiple of 8 only, and an odd one.
WIDTHS = {"real": WIDTH, "multiple of 8": 2056, "odd": 129}
DTYPES = (torch.bfloat16, torch.float32)
# (rank, candidates, whether there are gates, whether the vocabulary is reduced, whether tokens are drawn)
SELECTOR_SHAPES = [
    (64, 16, True, False, False),
    (64, 16, True, True, True),
    (64, 16, False, True, False),
    (256, 32, True, False, True),
]

# LDG.E.128.CONSTANT, STG.E.EF.U16: a global access, its width in bits among the dotted words; 32 where none is named.
GLOBAL_ACCESS = re.compile(r"\b(LDG|STG)((?:\.[A-Z0-9_]+)*)\s")
ACCESS_WIDTH = re.compile(r"\.[US]?(8|16|64|128|256)(?![0-9])")


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


@dataclass(frozen=True)
class Assembled:
    """What the assembler made of a kernel.

    Attributes:
        registers: of each thread.
        shared_bytes: of each program.
        spill_bytes: stored to and loaded from local memory.
        loads, stores: global accesses in the machine code, counted by their width in bits.
    """

    registers: int
    shared_bytes: int
    spill_bytes: int
    loads: dict[str, int]
    stores: dict[str, int]


def _compiled(arch: int, module: str, name: str, launch: Callable[..., Any], *args: Any) -> Assembled:
    """The kernel of this module that ``launch(*args)`` launches, compiled for ``arch`` instead."""
    place = importlib.import_module(f"peagle_kernels.{module}")
    kernel = AheadOfTime(getattr(place, name))
    with patch.object(driver, "_active", no_gpu(arch)), patch.object(place, name, kernel):
        launch(*args)
    (compiled,) = kernel.compiled
    return assemble(compiled, arch)


def prepare_inputs(
    arch: int, static: bool, num_groups: int, num_aux: int, dtype: torch.dtype, idx_dtype: torch.dtype, width: int
) -> Assembled:
    """``prepare_inputs_triton``'s kernel for ``num_aux`` captured hidden states of this width."""
    case = build(
        [Request(10, 4, 2), Request(5, 4, 0)],
        k=3,
        max_k=3,
        static=static,
        max_model_len=64,
        block_sizes=[16] * num_groups,
        widths=[width] * num_aux,
        dtype=dtype,
    )
    out = case.buffers(extra=5)
    out = out._replace(staging=out.staging.to(dtype))
    target = case.target._replace(idx_mapping=case.target.idx_mapping.to(idx_dtype))
    args = (target, case.aux, case.groups, case.batch, out)
    launch = partial(prepare_inputs_triton, **case.constants)
    return _compiled(arch, "prepare_inputs_kernel", "_prepare_inputs_kernel", launch, *args)


def gather_hidden(arch: int, dtype: torch.dtype, width: int) -> Assembled:
    """``gather_hidden_triton``'s kernel for rows of this width."""
    rows, row_map = torch.empty(4, width, dtype=dtype), torch.zeros(4, dtype=torch.int32)
    args = (rows, rows.clone(), rows[0].clone(), row_map)
    return _compiled(arch, "gather_hidden", "_gather_hidden_kernel", gather_hidden_triton, *args)


def select_candidates(arch: int, rank: int, num_candidates: int, gated: bool, reduced: bool, drawn: bool) -> Assembled:
    """``select_candidates_triton``'s kernel, with vLLM's own draw where tokens are drawn."""
    num_reqs, num_k, vocab_size = 2, 3, 64
    samples = num_reqs * num_k
    ids, tables = torch.zeros(samples, num_candidates, dtype=torch.int64), torch.zeros(vocab_size, rank).bfloat16()
    gates = torch.zeros(samples, rank).bfloat16() if gated else None
    numbers = torch.zeros(samples, dtype=torch.int64)
    candidates = Candidates(ids, ids.float(), gates, numbers.int(), numbers)
    selector = CandidateSelector(tables, tables.clone(), None, torch.ones(num_k), torch.ones(num_k), num_candidates)
    offsets = torch.zeros(vocab_size, dtype=torch.int64) if reduced else None
    drawing = None
    if drawn:
        interpreter.enable()  # vLLM imports no Triton where it sees no device
        from peagle_vllm.v2.candidate_sampler import draw

        q, cached = torch.zeros(num_reqs, num_k, vocab_size), ids.view(num_reqs, num_k, -1)
        sampling = torch.ones(num_reqs), numbers, numbers.int(), torch.ones(num_reqs)
        drawing = Drawing(draw, numbers, numbers, *sampling, q, cached, use_fp64=False)
    args = (torch.zeros(num_reqs, num_k, dtype=torch.int64), candidates, selector, offsets, ids.float(), drawing)
    return _compiled(arch, "select_candidates", "_select_candidates_kernel", select_candidates_triton, *args)


def lookup_drafts(arch: int, q: torch.dtype | None, cached: bool) -> Assembled:
    """``lookup_drafts_triton``'s kernel, where drafts are greedy, or with q whole or by cached entries."""
    numbers, one_hot = torch.zeros(2, dtype=torch.int64), None
    if q:
        cached_ids = torch.zeros(2, 3, 16, dtype=torch.int64) if cached else None
        one_hot = OneHot(torch.zeros(2, 3, 64, dtype=q), numbers, 0.0, 1.0, cached_ids)
    args = (
        torch.zeros(2, 3, dtype=torch.int64),
        torch.zeros(2, 64, dtype=torch.int32),
        numbers,
        numbers,
        2,
        64,
        one_hot,
    )
    return _compiled(arch, "lookup_drafts", "_lookup_drafts_kernel", lookup_drafts_triton, *args)


def limit_logits(arch: int, dtype: torch.dtype) -> Assembled:
    """``limit_logits_triton``'s kernel for a vocabulary of a server's size."""
    numbers = torch.ones(2)
    args = torch.zeros(2, 151_936, dtype=dtype), numbers.long(), numbers, numbers.int(), numbers
    return _compiled(arch, "limit_logits", "_limit_logits_kernel", limit_logits_triton, *args)


def assemble(compiled: Any, arch: int) -> Assembled:
    """Run the assembler again, for its report, and read the machine code that Triton keeps."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(compiled.asm["ptx"])
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={sm_arch_from_capability(arch)}", source, "-o", os.devnull]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.findall(r"Used (\d+) registers", report)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    assert (len(registers), len(spills)) == (1, 2), report
    loads, stores = access_widths(compiled.asm["sass"])
    return Assembled(int(registers[0]), compiled.metadata.shared, sum(map(int, spills)), loads, stores)


def access_widths(sass: str) -> tuple[dict[str, int], dict[str, int]]:
    """Global loads and global stores in this machine code: how many of each width in bits, the widest first."""
    counts: dict[str, Counter[int]] = {"LDG": Counter(), "STG": Counter()}
    for kind, words in GLOBAL_ACCESS.findall(sass):
        width = ACCESS_WIDTH.search(words)
        counts[kind][int(width[1]) if width else 32] += 1
    loads, stores = ({str(bits): n for bits, n in sorted(c.items(), reverse=True)} for c in counts.values())
    return loads, stores
