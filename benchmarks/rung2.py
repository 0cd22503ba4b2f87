"""Rung 2: the real target with its committed heads: acceptance, tokens/s, sampled requests, full batches."""

from collections.abc import Iterator
from typing import Any

from benchmarks import real_gpu
from benchmarks.arms import HAS_GPU, SLOWER, call
from benchmarks.page import Goal, Table, having, measured, ratio
from benchmarks.parts import Part
from benchmarks.real import SETS, committed
from benchmarks.real_gpu import ARMS, WITH_GRAPHS

OURS, NONE = "P-EAGLE K=3", "none"
LOOKUP, EAGLE3 = "P-EAGLE with look-up K=5", ("EAGLE-3 K=2", "EAGLE-3 K=3")
FOR_FULL_BATCHES = ("P-EAGLE, adaptive verification K=5", "P-EAGLE by batch size K=5")
LATE = "EAGLE-3, sampled K=3"  # the least valuable engine
LIMIT = 400 * SLOWER  # seconds: a part waits for the start, and then for the turns, of all that run with it

NOTES = (
    "SmolLM2-135M-Instruct and its committed heads, bfloat16, vLLM's default compilation and graph sizes, each engine "
    "in the process of its arm. Acceptance length: all prompts, answers as long as on the CPU, second turns after the "
    "CPU's first answers. Look-up is off but where an arm names it; stock vLLM serves the head without its selector. "
    "tokens/s: first turns, up to 64 tokens an answer, c at once. P-EAGLE by batch size drafts "
    f"[first batch size, last, K] {real_gpu.BY_BATCH_SIZE[1]}."
)


def parts() -> list[list[Part]]:
    """The most valuable first: as many engines as can start at the same time, then the last one."""
    if not HAS_GPU:
        return [[engine_part(OURS)]]
    return [[engine_part(arm) for arm in ARMS if arm not in (LATE, *WITH_GRAPHS)], [engine_part(LATE)]]


def engine_part(arm: str) -> Part:
    return Part(f"engine {arm}", call(real_gpu.run_arm, arm=arm), LIMIT, ARMS[arm].env)


def tables(cells: list[dict[str, Any]]) -> Iterator[Table]:
    yield "acceptance length, and its 95% interval here and on a CPU", having(cells, "al")
    yield "tokens/s", having(cells, "tokens_per_second")


def goals(cells: list[dict[str, Any]]) -> Iterator[Goal]:
    """Acceptance as on the CPU; faster than EAGLE-3 at 1 request; no loss at 64."""
    for name in SETS:
        al = measured(cells, "al", arm=OURS, set=name)
        # A run's cells hold the interval of the heads that it had.
        low, high = measured(cells, "on a CPU", arm=OURS, set=name) or committed()[OURS][name]["al_95"]
        yield Goal(f"acceptance length of {OURS} on {name}, a CPU's lower bound", ">=", low, al)
        yield Goal(f"acceptance length of {OURS} on {name}, a CPU's upper bound", "<=", high, al)
    ratios = (((OURS,), EAGLE3, 1, 1.2), ((LOOKUP,), EAGLE3, 1, 1.2), (FOR_FULL_BATCHES, (NONE,), 64, 1))
    for mine, others, c, least in ratios:
        for name in SETS:
            value = ratio(fastest(cells, mine, name, c), fastest(cells, others, name, c))
            yield Goal(f"tokens/s on {name} at {c}: {' or '.join(mine)} over {' or '.join(others)}", ">=", least, value)


def fastest(cells: list[dict[str, Any]], names: tuple[str, ...], prompts: str, c: int) -> float | None:
    """The tokens/s of the fastest of some arms on a set; None where none was measured."""
    speeds = [measured(cells, "tokens_per_second", arm=name, set=prompts, c=c) for name in names]
    return max((speed for speed in speeds if speed is not None), default=None)
