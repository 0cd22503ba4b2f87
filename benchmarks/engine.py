"""Tokens per second of the whole engine, every drafter: ``python -m benchmarks.gpu_day --only engine``.

Dummy weights of gpt-oss-20b's shapes, and synthetic rejection at the published acceptance lengths (SPEED-Bench code):
the engine's speed is real, the acceptance is the published one. One start an arm, every concurrency c inside: c
requests at once, greedy, to the same number of tokens. Without a GPU: tiny models, few tokens, and whatever acceptance
random weights give.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks import arms
from benchmarks.arms import HAS_GPU, STOCK, V1, V2
from benchmarks.engines import HEAD, EngineArm, dummy_llm, generate
from benchmarks.shapes import GPT_OSS_20B
from peagle_tools.shared.acceptance import read_engine

PROMPT, TOKENS, REPEATS = (128, 512, 2) if HAS_GPU else (8, 8, 2)
TARGET = GPT_OSS_20B if HAS_GPU else HEAD.target.config()

OURS = "plugin P-EAGLE K=7, V2"
# With the published acceptance length at each K. The first ones make the ratios.
ARMS = {
    OURS: EngineArm(V2, "ParallelEagleSpeculator", 7, length=3.38, parallel=True),
    "stock P-EAGLE K=7, V1": EngineArm(V1 | STOCK, "EagleProposer", 7, length=3.38, parallel=True),
    "EAGLE-3 K=7": EngineArm(V2 | STOCK, "EagleSpeculator", 7, length=2.59),
    "EAGLE-3 K=3": EngineArm(V2 | STOCK, "EagleSpeculator", 3, length=2.24),
    "none": EngineArm(V2 | STOCK, "NoneType"),
}
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


def page(cells: list[dict[str, Any]]) -> str:
    """The table, one line for each (arm, c); docs/performance.md says what OURS is to be over the others."""
    return arms.table(arms.compared(cells, OURS, ("c",), "tokens_per_second"))
