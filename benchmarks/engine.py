"""Tokens per second of the whole engine, every drafter: ``python -m benchmarks.engine [--out FILE]``.

Dummy weights of gpt-oss-20b's shapes, and synthetic rejection at the published acceptance lengths (SPEED-Bench code):
the engine's speed is real, the acceptance is the published one. One start an arm, every concurrency c inside: c
requests at once, greedy, to the same number of tokens. ``--passes 2`` runs the arms again in reversed order. Without a
GPU: tiny models, few tokens, and whatever acceptance random weights give.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import arms
from benchmarks.arms import HAS_GPU, STOCK, V1, V2
from benchmarks.draft_step import graph_sizes
from benchmarks.models import HEADS, TARGETS, TINY_HEADS, write_config
from benchmarks.probe import generate
from peagle_vllm.acceptance import read_engine
from peagle_vllm.provenance import provenance

CONCURRENCY = (1, 4, 16, 64) if HAS_GPU else (1, 2)
PROMPT, TOKENS, REPEATS = (128, 512, 3) if HAS_GPU else (8, 8, 1)
HEAD = HEADS["gpt-oss-20b"] if HAS_GPU else TINY_HEADS["tiny"]


@dataclass(frozen=True)
class Arm:
    """A drafter: its class (or the measurement is void), K, and its published acceptance length at this K."""

    env: dict[str, str]
    drafter: str
    k: int = 0
    length: float = 1.0
    parallel: bool = False


ARMS = {
    "none": Arm(V2 | STOCK, "NoneType"),
    "EAGLE-3 K=3": Arm(V2 | STOCK, "EagleSpeculator", 3, 2.24),
    "EAGLE-3 K=7": Arm(V2 | STOCK, "EagleSpeculator", 7, 2.59),
    "stock P-EAGLE K=7, V1": Arm(V1 | STOCK, "EagleProposer", 7, 3.38, parallel=True),
    "plugin P-EAGLE K=3, V2": Arm(V2, "ParallelEagleSpeculator", 3, 2.87, parallel=True),
    "plugin P-EAGLE K=7, V2": Arm(V2, "ParallelEagleSpeculator", 7, 3.38, parallel=True),
}
OURS = "plugin P-EAGLE K=7, V2"
DEFAULT_ARMS = [name for name in ARMS if name != "plugin P-EAGLE K=3, V2"]
# (of what, concurrency, the least that OURS may be of it); EAGLE-3 counts at its best K
AIMS = [
    ("stock P-EAGLE", 1, 1.25),
    ("stock P-EAGLE", 64, 1.1),
    ("EAGLE-3", 1, 1.69),
    ("EAGLE-3", 64, 1.25),
]


def engine_arguments(arm: Arm, target: str, concurrency: list[int], folder: Path) -> dict[str, Any]:
    """What ``LLM`` is built with; graphs for every concurrency, for stock vLLM's drafts too."""
    most = max(concurrency)
    arguments: dict[str, Any] = {
        "model": write_config(folder / "target", TARGETS[target] if HAS_GPU else HEAD.target.config()),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,  # its counters say what was accepted
        "max_num_seqs": most,
        "max_num_batched_tokens": (8192 if HAS_GPU else 512) + max(0, arm.k - 1) * most,
    }
    if HAS_GPU:
        arguments |= {"dtype": "bfloat16", "max_model_len": 4096}
        arguments["compilation_config"] = graph_sizes(concurrency, arm.k)
    else:
        arguments |= {"dtype": "float32", "enforce_eager": True, "max_model_len": 128}
        arguments["kv_cache_memory_bytes"] = 64 << 20
    if arm.k:
        speculative = {
            "method": "eagle3",
            "model": write_config(folder / "head", HEAD.config(arm.parallel)),
            "num_speculative_tokens": arm.k,
        }
        if arm.parallel:
            speculative["parallel_drafting"] = True
        if HAS_GPU:
            speculative |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": arm.length}
        arguments["speculative_config"] = speculative
    return arguments


def run_arm(name: str, target: str, concurrency: list[int], repeats: int, more: dict[str, Any]) -> list[dict]:
    """Every concurrency of one arm, in this process."""
    arm = ARMS[name]
    arms.prepare_process()
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(**arms.merged(engine_arguments(arm, target, concurrency, Path(folder)), more))
    _, drafter = arms.inside(llm)
    if (built := type(drafter).__name__) != arm.drafter:
        raise RuntimeError(f"vLLM built {built} where {name} is {arm.drafter}")
    cells = []
    for c in concurrency:
        generate(llm, c, PROMPT, max(TOKENS // 8, 2))  # whatever compiles or warms up late
        before = read_engine(llm)
        speeds = [c * TOKENS / generate(llm, c, PROMPT, TOKENS) for _ in range(repeats)]
        seen = read_engine(llm).since(before)
        length = seen.length if seen.num_drafts else None
        cells.append({"arm": name, "k": arm.k, "c": c, "tokens_per_second": speeds, "acceptance_length": length})
    return cells


def summed_up(passes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One cell for each (arm, c), the samples of all passes in it."""
    merged: dict[tuple[str, int], dict[str, Any]] = {}
    for cell in passes:
        kept = merged.setdefault((cell["arm"], cell["c"]), cell | {"tokens_per_second": []})
        kept["tokens_per_second"] = kept["tokens_per_second"] + cell["tokens_per_second"]
    return [cell | {"tokens_per_second": arms.summary(cell["tokens_per_second"], 1)} for cell in merged.values()]


def ratios(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """OURS over the others, with the issue's aims, wherever both are there."""
    found = []
    for of, c, aim in AIMS:
        speeds = {x["arm"]: x["tokens_per_second"]["median"] for x in cells if x["c"] == c}
        others = [speed for name, speed in speeds.items() if name.startswith(of)]
        if OURS in speeds and others:
            value = speeds[OURS] / max(others)
            found.append({"over": of, "c": c, "value": round(value, 3), "aim": aim, "met": value >= aim})
    return found


def table(cells: list[dict[str, Any]]) -> str:
    """One line for each (arm, c)."""
    lines = [arms.heading(f"{'arm':24} {'c':>3} {'tokens/s':>10} (p10-p90)        AL seen")]
    for cell in cells:
        speed, length = cell["tokens_per_second"], cell["acceptance_length"]
        spread = f"({speed['p10']:.0f}-{speed['p90']:.0f})"
        seen = f"{length:.2f}" if length else "-"
        lines.append(f"{cell['arm']:24} {cell['c']:3} {speed['median']:10.1f} {spread:16} {seen:>7}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the result here as JSON, after every process")
    parser.add_argument("--arms", choices=ARMS, nargs="+", default=DEFAULT_ARMS, metavar="ARM")
    parser.add_argument("--target", choices=TARGETS, default="gpt-oss-20b", help="its shapes (on a GPU)")
    parser.add_argument("--c", type=int, nargs="+", default=list(CONCURRENCY))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--passes", type=int, default=1, help="over all arms; every second one in reversed order")
    parser.add_argument("--llm", type=json.loads, default={}, help="more arguments for LLM in every arm, as JSON")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one process")
    parser.add_argument("--one", metavar="ARM", help=argparse.SUPPRESS)  # in this process
    args = parser.parse_args()
    if args.one:
        arms.hand_over(run_arm(args.one, args.target, args.c, args.repeats, args.llm))
        return
    seen: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    common = ["--target", args.target, "--c", *map(str, args.c), "--repeats", str(args.repeats)]
    common += ["--llm", json.dumps(args.llm)]
    for number in range(args.passes):
        for name in args.arms[:: -1 if number % 2 else 1]:
            try:
                seen += arms.run("benchmarks.engine", ["--one", name, *common], ARMS[name].env, args.timeout)
            except arms.ArmError as error:
                failed.append({"arm": name, "pass": number, "error": str(error)})
                print(f"{name} failed: {error}", flush=True)
            cells = summed_up(seen)
            report = {"target": args.target if HAS_GPU else HEAD.name, "prompt": PROMPT, "tokens": TOKENS}
            report |= {"published_acceptance": {name: arm.length for name, arm in ARMS.items()} if HAS_GPU else None}
            report |= {"repeats": args.repeats, "passes": args.passes, "llm": args.llm}
            report |= {"ratios": ratios(cells), "failed": failed, "cells": cells}
            arms.write_result(args.out, __doc__, provenance() | report)
    print(table(summed_up(seen)))
    for ratio in ratios(summed_up(seen)) if HAS_GPU else []:
        verdict = "met" if ratio["met"] else "missed"
        print(f"{OURS} over {ratio['over']}, c={ratio['c']}: {ratio['value']:.2f}x, aim {ratio['aim']}x: {verdict}")
    if not seen:
        raise SystemExit("benchmarks.engine: no arm ran")


if __name__ == "__main__":
    main()
