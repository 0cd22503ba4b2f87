"""The kernels of a prefill, against a copy of the bytes that they must move: ``make gpu-day GPU_DAY='1 kernels'``.

``fc``, which stands between ``prepare_inputs`` and ``gather_hidden``, belongs to neither. benchmarks.engine times
decode steps, whole. Without a GPU: a tiny shape, the CPU twins, the wall clock.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import arms
from benchmarks.arms import HAS_GPU
from benchmarks.shapes import NUM_AUX
from benchmarks.timing import copy_bandwidth, device_us
from peagle_kernels import gather_hidden, prepare_inputs
from tests.support.batches import Case, Request, build, moved

DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
# Of hidden states; requests, a chunk of a prompt each; rows of all chunks; draft tokens.
WIDTHS, REQUESTS, ROWS, K = ((2880, 2048, 4096), 4, 8192, 7) if HAS_GPU else ((64,), 2, 64, 3)


def batch(requests: list[Request], k: int, width: int, dtype: torch.dtype) -> Case:
    how: dict[str, Any] = {"static": False, "max_model_len": 16384, "block_sizes": [16]}
    return build(requests, k=k, max_k=k, widths=[width] * NUM_AUX, dtype=dtype, **how)


def moved_bytes(case: Case) -> dict[str, int]:
    """What each kernel must read and write, once.

    prepare_inputs reads the valid target rows' captured states, ids and positions and a block-table entry a draft row;
    it writes staging, and of each draft row id, position, map entry and slot. gather_hidden reads each valid row after
    fc, ``mask_hidden`` and the row map, and writes every draft row.
    """
    rows, samples = case.batch.num_target_rows, case.batch.num_reqs * case.batch.num_speculative_tokens
    valid = rows - sum(request.rejected for request in case.requests)
    draft_rows, staged = case.batch.num_rows, case.batch.num_staging_rows
    row = case.aux[0][0].nbytes
    indices = valid * (4 + 8) + draft_rows * (4 + 4 + 8 + 4 + 8) + samples * 3 * 8
    return {
        "prepare_inputs": (valid + staged) * NUM_AUX * row + indices,
        "gather_hidden": (valid + 1 + draft_rows) * row + draft_rows * 4,
    }


def calls(case: Case) -> dict[str, Callable[[], None]]:
    """A call of each kernel on this device, with buffers that exist already."""
    out, (target, aux, groups) = moved((case.buffers(), (case.target, case.aux, case.groups)), DEVICE)
    target = target._replace(idx_mapping=target.idx_mapping.int())
    sizes = case.batch.num_staging_rows, case.batch.num_rows, 1  # the values matter to no kernel
    made = (torch.randn(rows, aux[0].shape[1], device=DEVICE, dtype=DTYPE) for rows in sizes)
    after_fc, draft_hidden, (mask_hidden,) = made

    def prepare() -> None:
        prepare_inputs(target, aux, groups, case.batch, out, **case.constants)

    def gather() -> None:
        gather_hidden(draft_hidden, after_fc, mask_hidden, out.row_map[: case.batch.num_rows])

    prepare()  # gather_hidden needs a row map
    return {"prepare_inputs": prepare, "gather_hidden": gather}


@torch.inference_mode()
def run_all() -> Iterator[dict[str, Any]]:
    """A cell for each width and kernel, in this process."""
    bandwidth = copy_bandwidth()
    for width in WIDTHS:
        case = batch([Request(i, ROWS // REQUESTS, 0) for i in range(REQUESTS)], K, width, DTYPE)
        num_bytes = moved_bytes(case)
        for name, call in calls(case).items():
            us = arms.summary(device_us(call))
            share = float(f"{num_bytes[name] / (us['median'] * 1e-6) / bandwidth:.3g}")
            shape = {"kernel": name, "requests": REQUESTS, "rows": ROWS, "k": K, "width": width}
            yield {**shape, "device_us": us, "bytes": num_bytes[name], "of_copy_bandwidth": share}
