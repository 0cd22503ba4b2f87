"""Rung 4: long prompts; and what rung 2 showed to be slow, changed: many requests with a large K."""

import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks import engine, real_gpu, rung2
from benchmarks.arms import HAS_GPU, SLOWER, call
from benchmarks.page import Goal, Table, having, measured, ratio
from benchmarks.parts import Part
from benchmarks.real import SETS

PROMPTS = (32_768, 128_000) if HAS_GPU else (2 * engine.PROMPT,)  # tokens
LONG = (engine.OURS, engine.EAGLE3, engine.LOOKUP, engine.WINDOW, engine.NONE) if HAS_GPU else (engine.WINDOW,)
MANY = (*real_gpu.WITH_GRAPHS, rung2.NONE) if HAS_GPU else ()  # a rehearsal has no graphs
LIMIT = 370 * SLOWER  # seconds: a part waits for those that start with it

NOTES = (
    "Long prompts: as in rung 1, one request, whose prompt is in the prefix cache when its answer is timed. Many "
    "requests: as in rung 2, with CUDA graphs for all of them."
)


def parts() -> list[list[Part]]:
    """The engines of the small target, then those with long prompts, which need up to 36 GB: two at the same time."""
    many = [Part(f"many {arm}", call(real_gpu.run_arm, arm=arm), LIMIT, real_gpu.ARMS[arm].env) for arm in MANY]
    calls = {arm: call(engine.run_arm, arm=arm, batches=[1], prompts=PROMPTS) for arm in LONG}
    long = [Part(f"long {arm}", calls[arm], LIMIT, engine.LONG_ARMS[arm].env | engine.ROUTING) for arm in LONG]
    return [many, *(long[at : at + 2] for at in range(0, len(long), 2))]


def tables(cells: list[dict[str, Any]]) -> Iterator[Table]:
    yield "engines with long prompts", having(having(cells, "prompt"), "tokens_per_second")
    yield "draft steps with long prompts", having(cells, "device_us")
    yield "many requests", having(having(cells, "set"), "c")


def goals(cells: list[dict[str, Any]]) -> Iterator[Goal]:
    """With long prompts not slower than EAGLE-3; with graphs for all requests not slower than no drafter."""
    for prompt in PROMPTS:
        speeds = (measured(cells, "tokens_per_second", arm=arm, prompt=prompt) for arm in (engine.OURS, engine.EAGLE3))
        yield Goal(f"tokens/s over {engine.EAGLE3} after {prompt} tokens", ">=", 1, ratio(*speeds))
    for name, arm in itertools.product(SETS, real_gpu.WITH_GRAPHS):
        best = (rung2.fastest(cells, (label,), name, real_gpu.MOST) for label in (arm, rung2.NONE))
        yield Goal(f"tokens/s on {name} at {real_gpu.MOST}: {arm} over none", ">=", 1, ratio(*best))
