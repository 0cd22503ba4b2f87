"""A whole draft step, every drafter: ``python -m benchmarks.gpu_day --only "draft step"``.

Times ``propose()`` of live engines in decode steps with a full batch, on random weights of real shapes; every draft
is refused, which is a decode batch like any other. One process for each (arm, K), all batch sizes inside.
Columns: GPU time behind a busy device, host time on an idle one, launches as the profiler saw them, and the time over
the roofline, which is the bytes that the step must move at the measured copy bandwidth. Without a GPU: tiny heads and
the wall clock.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks import arms
from benchmarks.arms import HAS_GPU, STOCK, V1, V2
from benchmarks.engines import HEAD, EngineArm, dummy_llm, generate
from benchmarks.probe import num_steps, watched
from benchmarks.roofline import draft_step_roofline
from benchmarks.timing import copy_bandwidth

REPEATS, WARM = (30, 5) if HAS_GPU else (3, 1)
PROMPT = 256 if HAS_GPU else 8

# With the default length of 1 all drafts are refused, so every request stays at one token a step and the batch full.
ARMS = {
    "plugin V2": EngineArm(V2, "ParallelEagleSpeculator", parallel=True),
    "stock V1": EngineArm(V1 | STOCK, "EagleProposer", parallel=True),
    "EAGLE-3 V2": EngineArm(V2 | STOCK, "EagleSpeculator"),
    "plugin V1": EngineArm(V1, "ParallelEagleProposer", parallel=True),
}
OURS = "plugin V2"


def run_arm(arm: str, k: int, batches: list[int]) -> Iterator[dict]:
    """A cell for every batch size of one arm, in this process."""
    drafting, copied = replace(ARMS[arm], k=k), copy_bandwidth()
    engine, drafter = dummy_llm(drafting, HEAD.target.config(), HEAD, batches, 1024)
    for batch in batches:
        # Some more: the requests of a large batch do not start in one step.
        num_tokens = num_steps(REPEATS, WARM) + 8 + k + batch * PROMPT // 2048
        with watched(drafter, batch, k, REPEATS, WARM) as steps:
            generate(engine, batch, PROMPT, num_tokens)
        # Weights once a forward and rows once: the roofline without keys and values, and without logits.
        parts = draft_step_roofline(HEAD, k, batch, parallel=drafting.parallel)
        num_bytes = sum(part.bytes for name, part in parts.items() if name not in ("attention", "logits"))
        yield {
            **{"arm": arm, "k": k, "batch": batch},
            "device_us": (device := arms.summary(steps.device)),
            "host_us": arms.summary(steps.host),
            "launches": steps.traced or {},
            "/ roofline": round(device["median"] * 1e-6 * copied / num_bytes, 2),
        }


def page(cells: list[dict[str, Any]]) -> str:
    """The table; docs/performance.md says what share of the others' time, and of the roofline's, OURS is to take."""
    return arms.table(arms.compared(cells, OURS, ("k", "batch"), "device_us"))
