"""Tokens per second of the whole engine and one draft step of it, every drafter: parts of ``benchmarks.gpu_day``.

Dummy weights of gpt-oss-20b's shapes, and synthetic rejection at the published acceptance lengths (SPEED-Bench code):
the engine's speed is real, the acceptance is the published one. One start an arm, every concurrency c inside: c
requests at once, greedy, to the same number of tokens; then at every c ``propose()`` of full decode batches. Columns of
a draft step: GPU time behind a busy device, host time on an idle one, launches as the profiler saw them, and the time
over the roofline, which is the bytes that the step must move at the measured copy bandwidth. Without a GPU: tiny
models, few tokens, the wall clock, and whatever acceptance random weights give.
"""

from collections.abc import Iterator
from typing import Any

from benchmarks import arms, compiled, turns
from benchmarks.arms import HAS_GPU, SLOWER, STOCK, V1, V2
from benchmarks.engines import HEAD, EngineArm, dummy_llm, generate
from benchmarks.probe import num_steps, watched
from benchmarks.roofline import draft_step_roofline
from benchmarks.timing import copy_bandwidth
from peagle_tools.shared.acceptance import read_engine

PROMPT, TOKENS = (128, 512) if HAS_GPU else (8, 8)
REPEATS = 2
START_SECONDS, TIMED_SECONDS = 170 * SLOWER, 100 * SLOWER  # the limits of an arm's two stages
STEPS, WARM = (30, 5) if HAS_GPU else (3, 1)
# A dummy router sends every token to the same experts, so that few of them are read: the target would be too fast.
ROUTING = {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"}

OURS, NONE = "P-EAGLE K=7, V2", "none"
STOCK_PEAGLE, EAGLE3 = "stock P-EAGLE K=7, V1", "EAGLE-3 K=3, V2"
# With the published acceptance length at each K. The first ones make the ratios.
ARMS = {
    OURS: EngineArm(V2, "ParallelEagleSpeculator", 7, length=3.38, parallel=True),
    STOCK_PEAGLE: EngineArm(V1 | STOCK, "EagleProposer", 7, length=3.38, parallel=True),
    EAGLE3: EngineArm(V2 | STOCK, "EagleSpeculator", 3, length=2.24),
    NONE: EngineArm(V2 | STOCK, "NoneType"),
    "P-EAGLE K=7, V1": EngineArm(V1, "ParallelEagleProposer", 7, length=3.38, parallel=True),
    "EAGLE-3 K=7, V2": EngineArm(V2 | STOCK, "EagleSpeculator", 7, length=2.59),
}


def run_arm(arm: str, batches: list[int]) -> Iterator[dict]:
    """A cell of the engine at every concurrency of one arm, then one of its draft step at each, in this process."""
    drafting = ARMS[arm]
    turns.share(START_SECONDS)
    engine, drafter = dummy_llm(drafting, batches)
    turns.have_to_itself(TIMED_SECONDS)
    copied = copy_bandwidth()
    for c in batches:
        generate(engine, c, PROMPT, max(TOKENS // 8, 2))  # whatever compiles or warms up late
        before, kernels = read_engine(engine), len(compiled.names)
        speeds = [c * TOKENS / generate(engine, c, PROMPT, TOKENS) for _ in range(REPEATS)]
        counts = read_engine(engine).since(before)
        length, speed = counts.length if counts.num_drafts else None, arms.summary(speeds, 1)
        cell = {"arm": arm, "c": c, "tokens_per_second": speed, "acceptance_length": length}
        yield cell | {"compiled_late": sorted(set(compiled.names[kernels:]))}
    if drafter is not None:  # last: a step that cannot be watched must not cost an engine's
        yield from (draft_step(engine, drafter, arm, c, copied) for c in batches)


def draft_step(engine: Any, drafter: Any, arm: str, batch: int, copied: float) -> dict[str, Any]:
    """The cell of a draft step with ``batch`` requests; ``copied`` is the bandwidth of a copy, in bytes a second."""
    drafting = ARMS[arm]
    # Some more steps, since the requests of a large batch do not start in one; and on a GPU each may accept all drafts.
    num_tokens = (num_steps(STEPS, WARM) + 8 + batch * PROMPT // 2048) * (drafting.k + 1 if HAS_GPU else 2)
    room = engine.llm_engine.vllm_config.model_config.max_model_len - PROMPT - 1
    with watched(drafter, batch, drafting.k, STEPS, WARM) as steps:
        generate(engine, batch, PROMPT, min(num_tokens, room))
    # Weights once a forward and rows once: the roofline without keys and values, and without logits.
    parts = draft_step_roofline(HEAD, drafting.k, batch, parallel=drafting.parallel)
    num_bytes = sum(size for name, size in parts.items() if name not in ("attention", "logits"))
    device = arms.summary(steps.device)
    return {
        **{"arm": arm, "c": batch, "device_us": device, "host_us": arms.summary(steps.host)},
        "launches": steps.traced or {},
        "/ roofline": round(device["median"] * 1e-6 * copied / num_bytes, 2),
    }
