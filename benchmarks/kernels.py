"""Kernels beside copies of the bytes that they must move: a part of ``benchmarks.gpu_day``.

Of a prefill ``prepare_inputs`` and ``gather_hidden``; ``fc``, which stands between them, belongs to neither.
benchmarks.engine times decode steps, whole. Without a GPU: tiny shapes, the CPU twins, the wall clock.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks import arms
from benchmarks.arms import HAS_GPU
from benchmarks.shapes import NUM_AUX
from benchmarks.timing import copy_bandwidth, device_us
from peagle_kernels.gather_hidden import gather_hidden
from peagle_kernels.layout import DraftBatch
from peagle_kernels.prepare_inputs import prepare_inputs
from tests.support.batches import Request, build, moved

DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
K = 7 if HAS_GPU else 3
# Of a prefill: the widths of hidden states, requests, and the rows of each request's prompt.
WIDTHS = (2880, 2048, 4096) if HAS_GPU else (64,)
REQUESTS, CHUNK = (4, 2048) if HAS_GPU else (2, 32)


@torch.inference_mode()
def run_all() -> Iterator[dict[str, Any]]:
    """A cell for each kernel and shape, in this process."""
    bandwidth = copy_bandwidth()
    for width in WIDTHS:
        for name, (call, num_bytes) in prefill(width).items():
            us = arms.summary(device_us(call))
            share = float(f"{num_bytes / (us['median'] * 1e-6) / bandwidth:.3g}")
            shape = {"kernel": name, "requests": REQUESTS, "rows": REQUESTS * CHUNK, "k": K, "width": width}
            yield {**shape, "device_us": us, "bytes": num_bytes, "of_copy_bandwidth": share}


def prefill(width: int) -> dict[str, tuple[Callable[[], Any], int]]:
    """By kernel, its call for a chunk of every request's prompt, on this device, and the bytes that this must move."""
    chunk = Request(0, CHUNK, rejected=0, samples=False)
    shape: dict[str, Any] = {"k": K, "max_k": K, "static": False, "max_model_len": 16384, "block_sizes": [16]}
    case = build([chunk] * REQUESTS, **shape, widths=[width] * NUM_AUX, dtype=DTYPE)
    target, aux, groups, out = moved((case.target, case.aux, case.groups, case.buffers()), DEVICE)
    prepare = partial(prepare_inputs, target, aux, groups, case.batch, out, **case.constants)
    rows = case.batch.num_rows
    after_fc, hidden = (torch.randn(num, width, device=DEVICE, dtype=DTYPE) for num in (REQUESTS * CHUNK, rows))
    gather = partial(gather_hidden, hidden, after_fc, hidden[0].clone(), out.row_map[:rows])
    num_bytes = moved_bytes(case.batch, width * DTYPE.itemsize)
    # In this order: gather_hidden needs the row map of prepare_inputs.
    return {"prepare_inputs": (prepare, num_bytes[0]), "gather_hidden": (gather, num_bytes[1])}


def moved_bytes(batch: DraftBatch, row: int) -> tuple[int, int]:
    """What each kernel must read and write, once, where nothing was rejected; ``row``: bytes of a hidden state.

    prepare_inputs reads the target rows' captured states, ids and positions and a block-table entry a draft row; it
    writes staging, and of each draft row id, position, map entry and slot. gather_hidden reads each target row after
    fc, ``mask_hidden`` and the row map, and writes every draft row.
    """
    samples = batch.num_reqs * batch.num_speculative_tokens
    indices = batch.num_target_rows * (4 + 8) + batch.num_rows * (4 + 4 + 8 + 4 + 8) + samples * 3 * 8
    prepare = (batch.num_target_rows + batch.num_staging_rows) * NUM_AUX * row + indices
    return prepare, (batch.num_target_rows + 1 + batch.num_rows) * row + batch.num_rows * 4
