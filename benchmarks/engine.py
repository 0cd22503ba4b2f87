"""Tokens per second of the whole engine, every drafter: ``python -m benchmarks.engine [--out FILE]``.

Dummy weights of gpt-oss-20b's shapes, and synthetic rejection at the published acceptance lengths (SPEED-Bench code):
the engine's speed is real, the acceptance is the published one. One start an arm, every concurrency c inside: c
requests at once, greedy, to the same number of tokens. ``--passes 2`` runs the arms again in reversed order. Without a
GPU: tiny models, few tokens, and whatever acceptance random weights give.
"""

import json
from collections.abc import Iterator
from typing import Any

from benchmarks import arms
from benchmarks.arms import HAS_GPU, STOCK, V1, V2
from benchmarks.engines import Arm, dummy_llm, generate
from benchmarks.shapes import HEADS, TARGETS, TINY_HEADS
from peagle_tools.shared.acceptance import read_engine
from peagle_tools.shared.provenance import provenance

CONCURRENCY = (1, 4, 16, 64) if HAS_GPU else (1, 2)
PROMPT, TOKENS, REPEATS = (128, 512, 3) if HAS_GPU else (8, 8, 1)
HEAD = HEADS["gpt-oss-20b"] if HAS_GPU else TINY_HEADS["tiny"]

# With the published acceptance length at each K.
ARMS = {
    "none": Arm(V2 | STOCK, "NoneType"),
    "EAGLE-3 K=3": Arm(V2 | STOCK, "EagleSpeculator", 3, length=2.24),
    "EAGLE-3 K=7": Arm(V2 | STOCK, "EagleSpeculator", 7, length=2.59),
    "stock P-EAGLE K=7, V1": Arm(V1 | STOCK, "EagleProposer", 7, length=3.38, parallel=True),
    "plugin P-EAGLE K=3, V2": Arm(V2, "ParallelEagleSpeculator", 3, length=2.87, parallel=True),
    "plugin P-EAGLE K=7, V2": Arm(V2, "ParallelEagleSpeculator", 7, length=3.38, parallel=True),
}
OURS = "plugin P-EAGLE K=7, V2"
DEFAULT_ARMS = [name for name in ARMS if name != "plugin P-EAGLE K=3, V2"]
# (of what, concurrency, the least that OURS may be of it); EAGLE-3 counts at its best K
AIMS = [("stock P-EAGLE", 1, 1.25), ("stock P-EAGLE", 64, 1.1), ("EAGLE-3", 1, 1.69), ("EAGLE-3", 64, 1.25)]


def run_arm(arm: str, target: str, concurrency: list[int], repeats: int, llm: dict[str, Any]) -> Iterator[dict]:
    """A cell for every concurrency of one arm, in this process; ``llm``: more arguments for ``LLM``."""
    drafting = ARMS[arm]
    config = TARGETS[target] if HAS_GPU else HEAD.target.config()
    engine, _ = dummy_llm(drafting, config, HEAD, concurrency, 4096, llm)
    for c in concurrency:
        generate(engine, c, PROMPT, max(TOKENS // 8, 2))  # whatever compiles or warms up late
        before = read_engine(engine)
        speeds = [c * TOKENS / generate(engine, c, PROMPT, TOKENS) for _ in range(repeats)]
        counts = read_engine(engine).since(before)
        length = counts.length if counts.num_drafts else None
        yield {"arm": arm, "k": drafting.k, "c": c, "tokens_per_second": speeds, "acceptance_length": length}


def summed_up(passes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One cell for each (arm, c), the samples of all passes in it."""
    merged: dict[tuple[str, int], dict[str, Any]] = {}
    for cell in passes:
        kept = merged.setdefault((cell["arm"], cell["c"]), cell | {"tokens_per_second": []})
        kept["tokens_per_second"] += cell["tokens_per_second"]
    return [cell | {"tokens_per_second": arms.summary(cell["tokens_per_second"], 1)} for cell in merged.values()]


def ratios(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """OURS over the others, with the aims, wherever both are there."""
    found = []
    for of, c, aim in AIMS:
        speeds = {x["arm"]: x["tokens_per_second"]["median"] for x in cells if x["c"] == c}
        others = [speed for name, speed in speeds.items() if name.startswith(of)]
        if OURS in speeds and others:
            value = speeds[OURS] / max(others)
            found.append({"over": of, "c": c, "value": round(value, 3), "aim": aim, "met": value >= aim})
    return found


def page(cells: list[dict[str, Any]]) -> str:
    """The table, one line for each (arm, c), and on a GPU each ratio with its aim."""
    ours = {cell["c"]: cell["tokens_per_second"]["median"] for cell in cells if cell["arm"] == OURS}
    rows = []
    for cell in cells:
        speed, length, c = cell["tokens_per_second"], cell["acceptance_length"], cell["c"]
        spread = f"{speed['median']:.1f} ({speed['p10']:.0f}-{speed['p90']:.0f})"
        over = f"{ours[c] / speed['median']:.2f}x" if c in ours else "-"
        rows.append((cell["arm"], c, spread, over, f"{length:.2f}" if length else "-"))
    lines = [arms.measured_table(("arm", "c", "tokens/s (p10-p90)", "ours over it", "AL measured"), rows)]
    for ratio in ratios(cells) if HAS_GPU else []:
        value, aim = f"{ratio['value']:.2f}x", f"aim >= {ratio['aim']:g}: {arms.verdict(ratio['met'])}"
        lines.append(f"{OURS} over {ratio['over']}, c={ratio['c']}: {value}, {aim}")
    return "\n".join(lines)


def main() -> None:
    parser = arms.parser(__doc__)
    parser.add_argument("--arms", choices=ARMS, nargs="+", default=DEFAULT_ARMS, metavar="ARM")
    parser.add_argument("--target", choices=TARGETS, default="gpt-oss-20b", help="its shapes (on a GPU)")
    parser.add_argument("--c", type=int, nargs="+", default=list(CONCURRENCY))
    parser.add_argument("--passes", type=int, default=1, help="over all arms; every second one in reversed order")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--llm", type=json.loads, default={}, help="more arguments for LLM in every arm, as JSON")
    args = parser.parse_args()
    report = {"target": args.target if HAS_GPU else HEAD.name, "prompt": PROMPT, "tokens": TOKENS, **provenance()}
    report |= {"published_acceptance": {name: arm.length for name, arm in ARMS.items()} if HAS_GPU else None}
    report |= {"repeats": args.repeats, "passes": args.passes, "llm": args.llm}
    jobs = [{"arm": arm} for number in range(args.passes) for arm in args.arms[:: -1 if number % 2 else 1]]
    env = {name: arm.env for name, arm in ARMS.items()}
    common = {"target": args.target, "concurrency": args.c, "repeats": args.repeats, "llm": args.llm}
    for found, failed in arms.run_each(run_arm, jobs, env, **common):
        cells = summed_up(found)
        arms.write_result(args.out, __doc__, report | {"ratios": ratios(cells), "failed": failed, "cells": cells})
    print(page(cells))


if __name__ == "__main__":
    main()
