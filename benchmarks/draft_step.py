"""A whole draft step, every drafter: ``python -m benchmarks.gpu_day --only copy "draft step"``.

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
from benchmarks.arms import HAS_GPU, NOT_A_GPU, STOCK, V1, V2
from benchmarks.engines import HEAD, EngineArm, dummy_llm, generate
from benchmarks.probe import num_steps, watched
from benchmarks.roofline import draft_step_roofline
from benchmarks.timing import Timer, as_text, copy_bandwidth
from peagle_tools.shared.provenance import provenance

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


def bandwidth() -> dict[str, Any]:
    """Copy bandwidth of the device, bytes a second, and where it was measured."""
    return {"bandwidth": copy_bandwidth(Timer()), **provenance()}


def run_arm(arm: str, k: int, batches: list[int]) -> Iterator[dict]:
    """A cell for every batch size of one arm, in this process."""
    drafting, timer = replace(ARMS[arm], k=k), Timer()
    engine, drafter = dummy_llm(drafting, HEAD.target.config(), HEAD, batches, 1024)
    for batch in batches:
        # Some more: the requests of a large batch do not start in one step.
        num_tokens = num_steps(REPEATS, WARM) + 8 + k + batch * PROMPT // 2048
        with watched(drafter, timer, batch, k, REPEATS, WARM) as steps:
            generate(engine, batch, PROMPT, num_tokens)
        # Weights once a forward and rows once: the roofline without keys and values, and without logits.
        parts = draft_step_roofline(HEAD, k, batch, parallel=drafting.parallel).parts
        yield {
            "arm": arm,
            "k": k,
            "batch": batch,
            "device_us": arms.summary(steps.behind.device),
            "host_us": arms.summary(steps.idle.host),
            "launches": steps.traced,
            "bytes": sum(part.bytes for name, part in parts.items() if name not in ("attention", "logits")),
        }


def ratios(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What OURS takes of the others' time and of the roofline's."""
    us = {(c["arm"], c["k"], c["batch"]): c["device_us"]["median"] for c in cells}
    found = []
    for cell in (cell for cell in cells if cell["arm"] == OURS):
        where = {"k": cell["k"], "batch": cell["batch"]}
        others = {name: us.get((name, *where.values())) for name in ARMS if name != OURS}
        for name, other in (others | {"the roofline": cell.get("roofline_us")}).items():
            if other:
                found.append(where | {"of": name, "value": round(us[OURS, *where.values()] / other, 3)})
    return found


def row(cell: dict[str, Any]) -> tuple[object, ...]:
    """One cell for the table."""
    device, host = (cell[column]["median"] for column in ("device_us", "host_us"))
    over = f"{device / cell['roofline_us']:.2f}x" if "roofline_us" in cell else ""
    launches = as_text(cell["launches"])
    return (cell["k"], cell["batch"], cell["arm"], f"{device:.1f}", f"{host:.1f}", launches, over)


def page(cells: list[dict[str, Any]], copied: float | None) -> str:
    """The table and the ratios; docs/performance.md says what they are to be.

    Args:
        copied: bytes a second that a copy moves on this device; None: nothing is compared with the roofline.
    """
    if copied:
        cells = [cell | {"roofline_us": cell["bytes"] / copied * 1e6} for cell in cells]
    columns = ("K", "B", "arm", "device us", "host us", "launches", "/ roofline")
    lines = [arms.table(columns, map(row, cells), NOT_A_GPU)]
    for ratio in ratios(cells):
        lines.append(f"K={ratio['k']} B={ratio['batch']}: {ratio['value']} of {ratio['of']}")
    return "\n".join(lines)
