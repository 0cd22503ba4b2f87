"""Rung 4: long prompts; and what rung 2 showed to be slow, changed: many requests with a large K."""

import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks import arms, engine, real_gpu, rung2
from benchmarks.arms import HAS_GPU, SLOWER, call
from benchmarks.page import Goal, Table, measured, ratio
from benchmarks.parts import CELLS, Part
from benchmarks.real import SETS

PROMPTS = (32_768, 128_000) if HAS_GPU else (2 * engine.PROMPT,)  # tokens
WINDOW, LOOKUP = engine.LONG_ARMS
LONG = (engine.OURS, engine.EAGLE3, LOOKUP, WINDOW, engine.NONE) if HAS_GPU else (WINDOW,)
MANY = (*real_gpu.ARMS_WITH_GRAPHS, rung2.NONE) if HAS_GPU else ()  # a rehearsal has no graphs
LIMIT = 280 * SLOWER  # seconds: a part waits for those that start with it

NOTES = (
    "Long prompts: as in rung 1, one request, whose prompt is in the prefix cache when its answer is timed. Many "
    "requests: as in rung 2, with CUDA graphs for all of them."
    if HAS_GPU
    else "A rehearsal without a GPU: tiny models, eager, on a CPU. No number here says anything about a GPU."
)


def parts() -> list[Part]:
    """The engines of the small target, then those with long prompts, which need up to 36 GB: two at the same time."""
    many = [Part(f"many {arm}", call(real_gpu.run_arm, CELLS, arm=arm), LIMIT, arms.V2, False) for arm in MANY]
    return many + [long_part(arm, 1 + at // 2) for at, arm in enumerate(LONG)]


def long_part(arm: str, wave: int) -> Part:
    command = call(engine.run_arm, CELLS, arm=arm, batches=[1], prompts=PROMPTS)
    return Part(f"long {arm}", command, LIMIT, (engine.ARMS | engine.LONG_ARMS)[arm].env | engine.ROUTING, False, wave)


def tables(cells: list[dict[str, Any]]) -> Iterator[Table]:
    long = [cell for cell in cells if "prompt" in cell]
    for heading, figure in (("engines", "tokens_per_second"), ("draft steps", "device_us")):
        rows = [cell for cell in long if figure in cell]
        yield f"{heading} with long prompts", arms.compared(rows, engine.OURS, ("prompt",), figure)
    yield "many requests", [cell for cell in cells if "set" in cell and "c" in cell]


def goals(cells: list[dict[str, Any]]) -> Iterator[Goal]:
    """With long prompts not slower than EAGLE-3; with graphs for all requests not slower than no drafter."""
    for prompt in PROMPTS:
        speeds = (measured(cells, "tokens_per_second", arm=arm, prompt=prompt) for arm in (engine.OURS, engine.EAGLE3))
        yield Goal(f"tokens/s over {engine.EAGLE3} after {prompt} tokens", ">=", 1, ratio(*speeds))
    for name, arm in itertools.product(SETS, real_gpu.ARMS_WITH_GRAPHS):
        best = (rung2.fastest(cells, (label,), name, real_gpu.MOST) for label in (arm, rung2.NONE))
        yield Goal(f"tokens/s on {name} at {real_gpu.MOST}: {arm} over none", ">=", 1, ratio(*best))
