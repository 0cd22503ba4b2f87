"""Tokens per second of the whole engine, every drafter: ``python -m benchmarks.gpu_day --only engine``.

Dummy weights of gpt-oss-20b's shapes, and synthetic rejection at the published acceptance lengths (SPEED-Bench code):
the engine's speed is real, the acceptance is the published one. One start an arm, every concurrency c inside: c
requests at once, greedy, to the same number of tokens. Without a GPU: tiny models, few tokens, and whatever acceptance
random weights give.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from benchmarks import arms
from benchmarks.arms import HAS_GPU, NOT_A_GPU, STOCK, V1, V2
from benchmarks.engines import HEAD, EngineArm, dummy_llm, generate
from benchmarks.shapes import GPT_OSS_20B
from peagle_tools.shared.acceptance import read_engine

PROMPT, TOKENS, REPEATS = (128, 512, 2) if HAS_GPU else (8, 8, 2)
TARGET = GPT_OSS_20B if HAS_GPU else HEAD.target.config()

# With the published acceptance length at each K.
ARMS = {
    "none": EngineArm(V2 | STOCK, "NoneType"),
    "EAGLE-3 K=3": EngineArm(V2 | STOCK, "EagleSpeculator", 3, length=2.24),
    "EAGLE-3 K=7": EngineArm(V2 | STOCK, "EagleSpeculator", 7, length=2.59),
    "stock P-EAGLE K=7, V1": EngineArm(V1 | STOCK, "EagleProposer", 7, length=3.38, parallel=True),
    "plugin P-EAGLE K=7, V2": EngineArm(V2, "ParallelEagleSpeculator", 7, length=3.38, parallel=True),
}
OURS = "plugin P-EAGLE K=7, V2"
ADAPTIVE = f"{OURS}, adaptive verification"
ARMS[ADAPTIVE] = replace(ARMS[OURS], adaptive=True)


def run_arm(arm: str, batches: list[int]) -> Iterator[dict]:
    """A cell for every concurrency of one arm, in this process."""
    drafting = ARMS[arm]
    engine, _ = dummy_llm(drafting, TARGET, HEAD, batches, 4096)
    for c in batches:
        generate(engine, c, PROMPT, max(TOKENS // 8, 2))  # whatever compiles or warms up late
        before = read_engine(engine)
        speeds = [c * TOKENS / generate(engine, c, PROMPT, TOKENS) for _ in range(REPEATS)]
        counts = read_engine(engine).since(before)
        length, speed = counts.length if counts.num_drafts else None, arms.summary(speeds, 1)
        yield {"arm": arm, "k": drafting.k, "c": c, "tokens_per_second": speed, "acceptance_length": length}


def ratios(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """OURS over the others wherever both are there; over EAGLE-3 at its best K."""
    found = []
    for c, of in product(dict.fromkeys(cell["c"] for cell in cells), ("none", "stock P-EAGLE", "EAGLE-3", ADAPTIVE)):
        speeds = {cell["arm"]: cell["tokens_per_second"]["median"] for cell in cells if cell["c"] == c}
        others = [speed for name, speed in speeds.items() if name.startswith(of)]
        if OURS in speeds and others:
            found.append({"over": of, "c": c, "value": round(speeds[OURS] / max(others), 3)})
    return found


def page(cells: list[dict[str, Any]]) -> str:
    """The table, one line for each (arm, c), and on a GPU the ratios; docs/performance.md says what they are to be."""
    rows = []
    for cell in cells:
        speed, length = cell["tokens_per_second"], cell["acceptance_length"]
        spread = f"{speed['median']:.1f} ({speed['p10']:.0f}-{speed['p90']:.0f})"
        rows.append((cell["arm"], cell["c"], spread, f"{length:.2f}" if length else "-"))
    lines = [arms.table(("arm", "c", "tokens/s (p10-p90)", "AL measured"), rows, NOT_A_GPU)]
    for ratio in ratios(cells) if HAS_GPU else []:
        lines.append(f"{OURS} over {ratio['over']}, c={ratio['c']}: {ratio['value']:.2f}x")
    return "\n".join(lines)
