"""Each kernel against stock vLLM's functions and a device copy: ``python -m benchmarks.kernels [--out FILE]``.

Arms: ``prepare_inputs`` and ``gather_hidden`` alone, both in a row, stock V1's op sequence for the same step (the
runner's ``torch.cat`` of the captured states, then ``set_inputs_first_pass`` with its Triton kernel: vLLM's own
function, called on a stand-in for its proposer), and a plain device copy of the bytes that each kernel must move.
``fc``, which
stands between the two kernels, belongs to no arm. Without a GPU: tiny shapes, the CPU twins, the wall clock.
"""

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import arms
from benchmarks.arms import HAS_GPU
from benchmarks.batches import NUM_AUX, Batch, Shape, moved_bytes
from benchmarks.launches import profiled, shown
from benchmarks.timing import CudaTimer, WallTimer, copy_bandwidth, timer
from peagle_kernels import gather_hidden, prepare_inputs
from peagle_vllm.provenance import provenance

DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
WIDTHS, REQUESTS, DEPTHS = (2880, 2048, 4096), (1, 4, 16, 64, 256), (3, 5, 7, 10)
PREFILL_REQUESTS, PREFILL_ROWS, PREFILL_K = 4, 8192, 7
COPY_SHARE_AIM = 0.8  # of the copy bandwidth, both kernels in a row, prefill


def shapes(tiny: bool, widths: Sequence[int] = WIDTHS) -> Iterator[Shape]:
    """Every batch, decode first."""
    if tiny:
        yield Shape("decode", 2, 4, 3, 64)
        yield Shape("prefill", 2, 32, 3, 64)
        return
    for width in widths:
        for k in DEPTHS:
            for reqs in REQUESTS:
                yield Shape("decode", reqs, k + 1, k, width)
        yield Shape("prefill", PREFILL_REQUESTS, PREFILL_ROWS // PREFILL_REQUESTS, PREFILL_K, width)


@functools.cache
def set_inputs_first_pass() -> Callable[..., Any]:
    """Stock V1's function, before it is bound to a proposer."""
    if not HAS_GPU:
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        current_platform.register_triton_kernel_overrides()  # the CPU worker's stand-ins for the Triton kernels
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    return SpecDecodeBaseProposer.set_inputs_first_pass


def stock_call(batch: Batch) -> Callable[[], Any]:
    """Stock V1's op sequence for this batch."""
    prepare, (proposer, arguments) = set_inputs_first_pass(), batch.stock()

    def call() -> Any:
        return torch.cat(batch.aux, dim=-1), prepare(proposer, **arguments)

    return call


def calls(batch: Batch, num_bytes: dict[str, int]) -> dict[str, Callable[[], Any]]:
    """Every arm of a batch."""
    p = batch.plugin()

    def copy(name: str) -> Callable[[], Any]:
        source = torch.ones(num_bytes[name] // 2, dtype=torch.uint8, device=DEVICE)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def prepare() -> None:
        prepare_inputs(p.target, p.aux, p.groups, p.layout, p.step, p.buffers)

    def gather() -> None:
        gather_hidden(p.out, p.hidden, p.mask_hidden, p.buffers.row_map[: p.layout.num_rows])

    def both() -> None:
        prepare()
        gather()

    prepare()  # gather_hidden alone needs a row map
    plugin = {"prepare_inputs": prepare, "gather_hidden": gather, "both": both}
    return plugin | {f"copy of {name}": copy(name) for name in plugin} | {"stock": stock_call(batch)}


def same_draft_batch(batch: Batch) -> None:
    """Both sides build the same drafts' inputs, or the comparison is void. Checked by the rows that are sampled."""
    p = batch.plugin()
    prepare_inputs(p.target, p.aux, p.groups, p.layout, p.step, p.buffers)
    proposer, arguments = batch.stock()
    _, theirs, _ = set_inputs_first_pass()(proposer, **arguments)
    ours = p.buffers.sample_indices[: batch.shape.reqs * batch.shape.k]
    for name in ("input_ids", "positions"):
        mine, stock = getattr(p.buffers, name)[ours], getattr(proposer, name)[theirs.long()]
        if not torch.equal(mine, stock):
            raise SystemExit(f"benchmarks.kernels: {name} of the sampled rows differ from stock's at {batch.shape}")


@torch.inference_mode()
def measure(shape: Shape, clock: CudaTimer | WallTimer, bandwidth: float, repeats: int) -> dict[str, Any]:
    """One entry of the result: every arm of this shape."""
    batch = Batch(shape, DEVICE, DTYPE)
    num_bytes = moved_bytes(shape, DTYPE.itemsize)
    cell: dict[str, Any] = {**vars(shape), "rows": shape.rows, "arms": {}}
    for name, call in calls(batch, num_bytes).items():
        timed = clock.measure(call, repeats)
        arm = {"device_us": arms.summary(timed.device), "host_us": arms.summary(timed.host)}
        if name in num_bytes:
            achieved = num_bytes[name] / (arm["device_us"]["median"] * 1e-6)
            arm |= {"bytes": num_bytes[name], "bytes_per_second": achieved, "of_copy_bandwidth": achieved / bandwidth}
        arm["launches"] = profiled(call)[1] if HAS_GPU else None
        cell["arms"][name] = arm
    same_draft_batch(batch)
    median = {name: arm["device_us"]["median"] for name, arm in cell["arms"].items()}
    cell["stock_over_both"] = median["stock"] / median["both"]
    cell["copy_over"] = {name: median[f"copy of {name}"] / median[name] for name in num_bytes}
    return cell


def line(cell: dict[str, Any], name: str) -> str:
    """One arm of a cell, for the table."""
    arm, shape = cell["arms"][name], f"{cell['kind']} B={cell['reqs']} K={cell['k']} d={cell['width']}"
    device, host = arm["device_us"], arm["host_us"]["median"]
    text = f"{shape:30} {name:10} {device['median']:9.1f} ({device['p10']:.1f}-{device['p90']:.1f})  {host:8.1f}"
    text += f"  {shown(arm['launches']):>10}"
    if "bytes" in arm:
        text += f" {arm['bytes'] / 1e6:9.2f} {arm['of_copy_bandwidth']:7.0%} {cell['copy_over'][name]:7.0%}"
    elif name == "stock":
        text += f"  {cell['stock_over_both']:.2f}x both"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    parser.add_argument("--tiny", action="store_true", default=not HAS_GPU, help="tiny shapes (always so on a CPU)")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="of a hidden state")
    parser.add_argument("--repeats", type=int, default=None, help="of each arm and shape (default: 50; tiny: 5)")
    args = parser.parse_args()
    repeats = args.repeats or (5 if args.tiny else 50)
    clock = timer()
    bandwidth = copy_bandwidth(clock, DEVICE)
    empty = arms.summary(clock.measure(lambda: None, repeats).device)
    columns = "device us (p10-p90)   host us    launches        MB  of copy  copy/it"
    print(arms.heading(f"{'batch':30} {'arm':10} {columns}"))
    cells = []
    report = provenance() | {
        "dtype": str(DTYPE),
        "num_aux": NUM_AUX,
        "tiny": args.tiny,
        "repeats": repeats,
        "copy_bytes_per_second": bandwidth,
        "empty_us": empty,
        "cells": cells,
    }
    for shape in shapes(args.tiny, args.widths):
        cells.append(measure(shape, clock, bandwidth, repeats))
        for name in ("prepare_inputs", "gather_hidden", "both", "stock"):
            print(line(cells[-1], name), flush=True)
        arms.write_result(args.out, __doc__, report)
    for cell in (cell for cell in cells if cell["kind"] == "prefill" and HAS_GPU):
        share = cell["arms"]["both"]["of_copy_bandwidth"]
        verdict = "met" if share >= COPY_SHARE_AIM else "missed"
        print(f"prefill d={cell['width']}: {share:.0%} of copy bandwidth, aim {COPY_SHARE_AIM:.0%}: {verdict}")


if __name__ == "__main__":
    main()
