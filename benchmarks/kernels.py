"""The kernels of a prefill, against a copy of the bytes that they must move: ``make gpu-day GPU_DAY='1 kernels'``.

``fc``, which stands between ``prepare_inputs`` and ``gather_hidden``, belongs to neither. benchmarks.engine times
decode steps, whole. Without a GPU: a tiny shape, the CPU twins, the wall clock.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks import arms
from benchmarks.arms import HAS_GPU
from benchmarks.shapes import NUM_AUX
from benchmarks.timing import copy_bandwidth, device_us
from peagle_kernels.batch import KVGroups, TargetBatch, allocate_buffers
from peagle_kernels.gather_hidden import gather_hidden
from peagle_kernels.layout import DraftBatch
from peagle_kernels.prepare_inputs import prepare_inputs

DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
WIDTHS = (2880, 2048, 4096) if HAS_GPU else (64,)  # of hidden states
REQUESTS, CHUNK = (4, 2048) if HAS_GPU else (2, 32)  # and the rows of each request's prompt
K = 7 if HAS_GPU else 3
MAX_MODEL_LEN, BLOCK_SIZE = 16384, 16


def prefill(width: int) -> dict[str, Any]:
    """Arguments of ``prepare_inputs`` on this device: a chunk of every request's prompt."""
    rows, draft_rows = REQUESTS * CHUNK, CHUNK + K - 1
    ints, longs = ({"device": DEVICE, "dtype": dtype} for dtype in (torch.int32, torch.int64))
    ones, reqs = torch.ones(REQUESTS, **ints), torch.arange(REQUESTS, **ints)
    target = TargetBatch(
        input_ids=torch.ones(rows, **ints),
        positions=torch.arange(CHUNK, **longs).repeat(REQUESTS),
        query_start_loc=torch.arange(0, rows + 1, CHUNK, **ints),
        num_rejected=ones - 1,
        num_sampled=ones,
        idx_mapping=reqs,
        last_sampled=ones.long(),
        next_prefill_tokens=ones,
        temperature=ones.float(),
        seeds=ones.long(),
        top_k=ones,
        top_p=ones.float(),
    )
    batch = DraftBatch(REQUESTS, rows, K, REQUESTS * draft_rows, REQUESTS)
    staging = torch.empty(rows, NUM_AUX * width, device=DEVICE, dtype=DTYPE)
    sizes = {"max_rows": batch.num_rows, "max_num_reqs": REQUESTS, "max_speculative_tokens": K}
    out = allocate_buffers(**sizes, staging=staging)
    out.query_start_loc.copy_(torch.arange(0, batch.num_rows + 1, draft_rows))
    blocks = torch.arange(MAX_MODEL_LEN // BLOCK_SIZE, **ints)
    return {
        "target": target,
        "aux": tuple(torch.randn(rows, width, device=DEVICE, dtype=DTYPE) for _ in range(NUM_AUX)),
        "groups": KVGroups(((1 + blocks).repeat(REQUESTS, 1),), (BLOCK_SIZE,)),
        "batch": batch,
        "out": out,
        "max_model_len": MAX_MODEL_LEN,
        "parallel_drafting_token_id": 511,
    }


def moved_bytes(batch: DraftBatch, row: int) -> dict[str, int]:
    """What each kernel must read and write, once, where nothing was rejected; ``row``: bytes of a hidden state.

    prepare_inputs reads the target rows' captured states, ids and positions and a block-table entry a draft row; it
    writes staging, and of each draft row id, position, map entry and slot. gather_hidden reads each target row after
    fc, ``mask_hidden`` and the row map, and writes every draft row.
    """
    samples = batch.num_reqs * batch.num_speculative_tokens
    indices = batch.num_target_rows * (4 + 8) + batch.num_rows * (4 + 4 + 8 + 4 + 8) + samples * 3 * 8
    return {
        "prepare_inputs": (batch.num_target_rows + batch.num_staging_rows) * NUM_AUX * row + indices,
        "gather_hidden": (batch.num_target_rows + 1 + batch.num_rows) * row + batch.num_rows * 4,
    }


@torch.inference_mode()
def run_all() -> Iterator[dict[str, Any]]:
    """A cell for each width and kernel, in this process."""
    bandwidth = copy_bandwidth()
    for width in WIDTHS:
        arguments = prefill(width)
        batch, row_map = arguments["batch"], arguments["out"].row_map
        sizes = batch.num_staging_rows, batch.num_rows, 1  # the values matter to no kernel
        hidden = (torch.randn(rows, width, device=DEVICE, dtype=DTYPE) for rows in sizes)
        after_fc, draft_hidden, (mask_hidden,) = hidden
        calls = {
            "prepare_inputs": partial(prepare_inputs, **arguments),  # timed first: gather_hidden needs its row map
            "gather_hidden": partial(gather_hidden, draft_hidden, after_fc, mask_hidden, row_map[: batch.num_rows]),
        }
        num_bytes = moved_bytes(batch, width * DTYPE.itemsize)
        for name, call in calls.items():
            us = arms.summary(device_us(call))
            share = float(f"{num_bytes[name] / (us['median'] * 1e-6) / bandwidth:.3g}")
            shape = {"kernel": name, "requests": REQUESTS, "rows": batch.num_target_rows, "k": K, "width": width}
            yield {**shape, "device_us": us, "bytes": num_bytes[name], "of_copy_bandwidth": share}
