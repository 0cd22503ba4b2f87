"""A whole draft step, every drafter in the same run: ``python -m benchmarks.draft_step [--out FILE]``.

Times ``propose()`` of live engines in decode steps with a full batch, on random weights of real shapes; every draft
is refused, which is a decode batch like any other. One process for each (arm, head shape, K), all batch sizes inside.
Columns: GPU time behind a busy device and from an idle one, host time, launches as the profiler saw them, the bytes
that the step must move, and its time over the floor, which is those bytes at the measured copy bandwidth. Without a
GPU: tiny heads, the wall clock, operations and Triton launches as the dispatcher saw them.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import arms
from benchmarks.arms import HAS_GPU, STOCK, V1, V2
from benchmarks.launches import shown
from benchmarks.models import HEADS, TINY_HEADS, Head, own_lm_head, write_config
from benchmarks.probe import generate, num_steps, watched
from benchmarks.timing import copy_bandwidth, timer
from peagle_vllm.provenance import provenance

BATCHES, DEPTHS = ((1, 4, 16, 64, 256), (3, 5, 7, 10)) if HAS_GPU else ((1, 2), (3,))
SHAPES = HEADS if HAS_GPU else TINY_HEADS
REPEATS, WARM = (30, 5) if HAS_GPU else (3, 1)
PROMPT = 256 if HAS_GPU else 8


@dataclass(frozen=True)
class Arm:
    """A drafter on a runner. ``drafter`` is the class that must come out, or the arm measured something else."""

    env: dict[str, str]
    drafter: str
    parallel: bool = True
    eager: bool = False


ARMS = {
    "stock V1": Arm(V1 | STOCK, "EagleProposer"),
    "plugin V1": Arm(V1, "ParallelEagleProposer"),
    "plugin V2 eager": Arm(V2, "ParallelEagleSpeculator", eager=True),
    "plugin V2 graph": Arm(V2, "ParallelEagleSpeculator"),
    "EAGLE-3 V2": Arm(V2 | STOCK, "EagleSpeculator", parallel=False),
}
if not HAS_GPU:
    del ARMS["plugin V2 graph"]

# (of what, batch size, the most that "plugin V2 graph" may take of it)
AIMS = [("of stock V1", 1, 0.5), ("of stock V1", 64, 0.75), ("of the floor", 1, 1.3)]


def graph_sizes(batches: list[int], k: int) -> dict[str, Any]:
    """Capture sizes for every batch size: the target's rows, a P-EAGLE draft's, and those of EAGLE-3's later steps.

    V1 rounds sizes up to whole requests of 1 + K rows and drops what that lifts over the largest.
    """
    whole = [-(-n * 2 * k // (k + 1)) * (k + 1) for n in batches]
    sizes = sorted({*batches, *(n * (k + 1) for n in batches), *whole} - {0})
    return {"cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": sizes[-1]}


def engine_arguments(arm: Arm, head: Head, k: int, batches: list[int], folder: Path) -> dict[str, Any]:
    """What ``LLM`` is built with: dummy weights, and graphs for every batch size, the same sizes in every arm."""
    most = max(batches)
    speculative: dict[str, Any] = {
        "method": "eagle3",
        "model": write_config(folder / "head", head.config(arm.parallel)),
        "num_speculative_tokens": k,
    }
    if arm.parallel:
        speculative["parallel_drafting"] = True
    arguments: dict[str, Any] = {
        "model": write_config(folder / "target", head.target.config()),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "enable_prefix_caching": False,
        "max_num_seqs": most,
        "max_num_batched_tokens": max(8192 if HAS_GPU else 512, 2 * k * most) + (k - 1) * most,
        "speculative_config": speculative,
    }
    if not HAS_GPU:
        return arguments | {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 128,
            "kv_cache_memory_bytes": 64 << 20,
        }
    # Refused drafts leave every request at one token a step, so that the batch stays full.
    speculative |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 1.0}
    compilation = graph_sizes(batches, k)
    if arm.eager:
        compilation["cudagraph_mode"] = "PIECEWISE"  # the drafter's own graph is off, its compilation on
    return arguments | {"dtype": "bfloat16", "max_model_len": 1024, "compilation_config": compilation}


def run_arm(name: str, head_name: str, k: int, batches: list[int], repeats: int, more: dict[str, Any]) -> list[dict]:
    """Every batch size of one arm, in this process."""
    arm, head = ARMS[name], SHAPES[head_name]
    arms.prepare_process()
    if head.reduced:
        own_lm_head()
    from vllm import LLM

    clock, cells = timer(), []
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(**arms.merged(engine_arguments(arm, head, k, batches, Path(folder)), more))
    _, drafter = arms.inside(llm)
    if (built := type(drafter).__name__) != arm.drafter:
        raise RuntimeError(f"vLLM built {built} where {name} is {arm.drafter}")
    for batch in batches:
        # Some more: the requests of a large batch do not start in one step.
        num_tokens = num_steps(repeats, WARM) + 8 + k + batch * PROMPT // 2048
        with watched(drafter, clock, batch, k, repeats, WARM) as steps:
            generate(llm, batch, PROMPT, num_tokens)
        cell = {
            "arm": name,
            "head": head_name,
            "k": k,
            "batch": batch,
            "device_us": arms.summary(steps.behind.device),
            "idle_us": arms.summary(steps.idle.device),
            "host_us": arms.summary(steps.idle.host),
            "launches": steps.traced[-1] if steps.traced else dispatched(llm, drafter, batch),
            "bytes": head.step_bytes(arm.parallel, batch, k),
        }
        cells.append(cell)
    return cells


def dispatched(llm: Any, drafter: Any, batch: int) -> dict[str, int]:
    """On a CPU: operations and Triton launches of one step, outside the drafter's forward."""
    from benchmarks.dispatches import counted

    with counted(drafter) as steps:
        generate(llm, batch, PROMPT, 6)
    return {kind: sum(steps[-1][kind].values()) for kind in ("operations", "launches")}


def ratios(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The issue's aims for "plugin V2 graph", wherever the cells that they compare are there."""
    by = {(c["arm"], c["head"], c["k"], c["batch"]): c for c in cells}
    found = []
    for (arm, head, k, batch), cell in by.items():
        if arm != "plugin V2 graph":
            continue
        stock = by.get(("stock V1", head, k, batch))
        values = {"of the floor": cell["device_us"]["median"] / cell["floor_us"]}
        if stock:
            values["of stock V1"] = cell["device_us"]["median"] / stock["device_us"]["median"]
        for what, at, aim in AIMS:
            if at == batch and what in values:
                found.append(
                    {"head": head, "k": k, "batch": batch, "what": what, "value": values[what], "aim": aim}
                    | {"met": values[what] <= aim}
                )
        launches = {kind: cell["launches"][kind] for kind in ("kernel_launches", "graph_launches")}
        met = launches == {"kernel_launches": 1, "graph_launches": 1}
        found.append({"head": head, "k": k, "batch": batch, "what": "launches", "value": launches, "met": met})
    return found


def line(cell: dict[str, Any]) -> str:
    """One row of the table."""
    text = f"{cell['head']:32} {cell['k']:2} {cell['batch']:3} {cell['arm']:16}"
    for column in ("device_us", "idle_us", "host_us"):
        text += f" {cell[column]['median']:9.1f}"
    text += f" {shown(cell['launches']):>12}"
    if "floor_us" in cell:
        over = cell["device_us"]["median"] / cell["floor_us"]
        text += f" {cell['bytes'] / 1e6:8.1f} {cell['floor_us']:8.1f} {over:6.2f}x"
    return text


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the result here as JSON, after every process")
    parser.add_argument("--arms", choices=ARMS, nargs="+", default=list(ARMS), metavar="ARM")
    parser.add_argument("--heads", choices=SHAPES, nargs="+", default=list(SHAPES), metavar="HEAD")
    parser.add_argument("--k", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--repeats", type=int, default=REPEATS, help="timed steps of each kind and batch size")
    parser.add_argument("--llm", type=json.loads, default={}, help="more arguments for LLM in every arm, as JSON")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one process")
    parser.add_argument("--one", nargs=3, metavar=("ARM", "HEAD", "K"), help=argparse.SUPPRESS)  # in this process
    parser.add_argument("--bandwidth", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.bandwidth:
        arms.hand_over({"bandwidth": copy_bandwidth(timer(), "cuda" if HAS_GPU else "cpu"), **provenance()})
        return
    if args.one:
        name, head, k = args.one
        arms.hand_over(run_arm(name, head, int(k), args.batch, args.repeats, args.llm))
        return
    # In a process of its own as well: this one must leave the GPU's memory alone.
    measured = arms.run("benchmarks.draft_step", ["--bandwidth"], {}) if HAS_GPU else provenance()
    bandwidth = measured.pop("bandwidth", None)
    columns = f"{'behind us':>9} {'idle us':>9} {'host us':>9} {'launches':>12} {'MB':>8} {'floor us':>8}  /floor"
    print(arms.heading(f"{'head':32} {'K':>2} {'B':>3} {'arm':16} {columns}"))
    cells: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    common = ["--batch", *map(str, args.batch), "--repeats", str(args.repeats), "--llm", json.dumps(args.llm)]
    for head in args.heads:
        for k in args.k:
            for name in args.arms:
                try:
                    one = ["--one", name, head, str(k), *common]
                    new = arms.run("benchmarks.draft_step", one, ARMS[name].env, args.timeout)
                except arms.ArmError as error:
                    failed.append({"arm": name, "head": head, "k": k, "error": str(error)})
                    print(f"{head:32} {k:2}   - {name:16} failed: {error}", flush=True)
                    continue
                for cell in new:
                    if bandwidth:
                        cell["floor_us"] = cell["bytes"] / bandwidth * 1e6
                    cells.append(cell)
                    print(line(cell), flush=True)
                report = {"copy_bytes_per_second": bandwidth, "repeats": args.repeats, "llm": args.llm}
                report |= {"heads": {n: vars(SHAPES[n]) | {"target": vars(SHAPES[n].target)} for n in args.heads}}
                report |= {"ratios": ratios(cells), "failed": failed, "cells": cells}
                arms.write_result(args.out, __doc__, measured | report)
    for ratio in ratios(cells):
        aim = f", aim {ratio['aim']}" if "aim" in ratio else ""
        print(
            f"{ratio['head']} K={ratio['k']} B={ratio['batch']}: {ratio['what']} {ratio['value']}{aim}: "
            f"{'met' if ratio['met'] else 'missed'}"
        )
    if failed and not cells:
        raise SystemExit("benchmarks.draft_step: no arm ran")


if __name__ == "__main__":
    main()
