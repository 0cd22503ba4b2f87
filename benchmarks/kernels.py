"""Each kernel against a device copy of the bytes that it must move: ``python -m benchmarks.kernels [--out FILE]``.

``prepare_inputs`` and ``gather_hidden`` alone, and both in a row; ``fc``, which stands between the two, belongs to
neither. benchmarks.draft_step compares the whole step with stock vLLM's. Without a GPU: tiny shapes, the CPU twins, the
wall clock.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import arms
from benchmarks.arms import HAS_GPU, NOT_A_GPU
from benchmarks.shapes import NUM_AUX
from benchmarks.timing import Timer, copy_bandwidth
from peagle_kernels import gather_hidden, prepare_inputs
from peagle_tools.shared.provenance import provenance
from tests.support.batches import Case, Request, build, moved

DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
REPEATS = 50 if HAS_GPU else 5
WIDTHS, REQUESTS, DEPTHS = (2880, 2048, 4096), (1, 4, 16, 64, 256), (3, 5, 7, 10)
PREFILL_REQUESTS, PREFILL_ROWS, PREFILL_K = 4, 8192, 7
KERNELS = ("prepare_inputs", "gather_hidden", "both")


@dataclass(frozen=True)
class Shape:
    """A batch.

    Attributes:
        kind: "decode" (each request verifies K + 1 rows, some refused) or "prefill" (one chunk a request).
        reqs: requests.
        query: target rows of each.
        k: draft tokens a step.
        width: of a hidden state; NUM_AUX of them are captured.
    """

    kind: str
    reqs: int
    query: int
    k: int
    width: int

    def case(self, dtype: torch.dtype) -> Case:
        """The batch; in decode batches all counts of refused tokens occur in turn."""
        decode = self.kind == "decode"
        requests = [
            Request(i % 7 + 200 * decode, self.query, i % (self.k + 1) if decode else 0) for i in range(self.reqs)
        ]
        return build(
            requests,
            k=self.k,
            max_k=self.k,
            static=decode,
            max_model_len=4096 if self.query <= 1024 else 16384,
            block_sizes=[16],
            widths=[self.width] * NUM_AUX,
            dtype=dtype,
        )


def shapes() -> Iterator[Shape]:
    """Every batch, decode first."""
    if not HAS_GPU:
        yield Shape("decode", 2, 4, 3, 64)
        yield Shape("prefill", 2, 32, 3, 64)
        return
    for width in WIDTHS:
        for k in DEPTHS:
            for reqs in REQUESTS:
                yield Shape("decode", reqs, k + 1, k, width)
        yield Shape("prefill", PREFILL_REQUESTS, PREFILL_ROWS // PREFILL_REQUESTS, PREFILL_K, width)


def moved_bytes(case: Case) -> dict[str, int]:
    """What each kernel must read and write, once: by KERNELS.

    prepare_inputs reads the valid target rows' captured states, ids and positions and a block-table entry a draft row;
    it writes staging, and of each draft row id, position, map entry and slot. gather_hidden reads each valid row after
    fc, ``mask_hidden`` and the row map, and writes every draft row.
    """
    rows, samples = case.batch.num_target_rows, case.batch.num_reqs * case.batch.num_speculative_tokens
    valid = rows - sum(request.rejected for request in case.requests)
    draft_rows, staged = case.batch.num_rows, case.batch.num_staging_rows
    row = case.aux[0][0].nbytes
    indices = valid * (4 + 8) + draft_rows * (4 + 4 + 8 + 4 + 8) + samples * 3 * 8
    prepare_bytes = (valid + staged) * NUM_AUX * row + indices
    gather_bytes = (valid + 1 + draft_rows) * row + draft_rows * 4
    return dict(zip(KERNELS, (prepare_bytes, gather_bytes, prepare_bytes + gather_bytes), strict=True))


def calls(shape: Shape, case: Case) -> dict[str, Callable[[], None]]:
    """By KERNELS a call on this device, with buffers that exist already."""
    out, (target, aux, groups) = moved((case.buffers(), (case.target, case.aux, case.groups)), DEVICE)
    target = target._replace(idx_mapping=target.idx_mapping.int())
    sizes = case.batch.num_staging_rows, case.batch.num_rows, 1  # the values matter to no kernel
    made = (torch.randn(rows, shape.width, device=DEVICE, dtype=DTYPE) for rows in sizes)
    after_fc, draft_hidden, (mask_hidden,) = made

    def prepare() -> None:
        prepare_inputs(target, aux, groups, case.batch, out, **case.constants)

    def gather() -> None:
        gather_hidden(draft_hidden, after_fc, mask_hidden, out.row_map[: case.batch.num_rows])

    def both() -> None:
        prepare()
        gather()

    prepare()  # gather_hidden alone needs a row map
    return dict(zip(KERNELS, (prepare, gather, both), strict=True))


@torch.inference_mode()
def measure(shape: Shape, timer: Timer, bandwidth: float) -> dict[str, Any]:
    """One entry of the result: both kernels at this shape."""
    case, found = shape.case(DTYPE), {}
    num_bytes = moved_bytes(case)
    for name, call in calls(shape, case).items():
        times = timer.measure(call, REPEATS)
        device = arms.summary(times.device)
        found[name] = {
            "device_us": device,
            "host_us": arms.summary(times.host),
            "bytes": num_bytes[name],
            "of_copy_bandwidth": num_bytes[name] / (device["median"] * 1e-6) / bandwidth,
        }
    return {**vars(shape), "arms": found}


def row(cell: dict[str, Any], name: str) -> tuple[object, ...]:
    """One arm of a cell, for the table."""
    arm, device = cell["arms"][name], cell["arms"][name]["device_us"]
    return (
        f"{cell['kind']} B={cell['reqs']} K={cell['k']} d={cell['width']}",
        name,
        f"{device['median']:.1f} ({device['p10']:.1f}-{device['p90']:.1f})",
        f"{arm['host_us']['median']:.1f}",
        f"{arm['bytes'] / 1e6:.2f}",
        f"{arm['of_copy_bandwidth']:.0%}",
    )


def page(cells: list[dict[str, Any]]) -> str:
    """The table; docs/performance.md says what share of the copy bandwidth a prefill is to reach."""
    columns = ("batch", "arm", "device us (p10-p90)", "host us", "MB", "of copy bandwidth")
    return arms.table(columns, [row(cell, name) for cell in cells for name in KERNELS], NOT_A_GPU)


def main() -> None:
    out = arms.parser(__doc__).parse_args().out
    timer, cells = Timer(), []
    bandwidth = copy_bandwidth(timer)
    settings = {"dtype": str(DTYPE), "num_aux": NUM_AUX, "repeats": REPEATS, "copy_bytes_per_second": bandwidth}
    report = provenance() | settings | {"cells": cells}
    for shape in shapes():
        cells.append(measure(shape, timer, bandwidth))
        arms.write_result(out, __doc__, report)
    print(page(cells))


if __name__ == "__main__":
    main()
