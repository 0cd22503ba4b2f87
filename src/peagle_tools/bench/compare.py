"""``bench compare A B``, the regression gate: what is worse in B, beyond noise. docs/bench.md has the rules."""

import json
import math
from dataclasses import dataclass
from typing import Literal

from rich.table import Table

from peagle_tools.bench.cells import CellResult, Condition
from peagle_tools.bench.metrics import Point, Ratio, number, points, same_texts, without_speculation
from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.provenance import device

STYLES = {"worse": "bold red", "faster": "green", "same": ""}
AL_TOLERANCE = 0.03
SHOWN = {
    "tokens/s": "output_throughput",
    "TTFT p50": "p50_ttft_ms",
    "TPOT p50": "p50_tpot_ms",
    "AL": "acceptance_length",
}
# Time -> vLLM's name, and how many tolerances a loss may be: tails rest on few requests.
TIMES = {
    "TTFT p50": ("p50_ttft_ms", 2),
    "TTFT p99": ("p99_ttft_ms", 4),
    "TPOT p50": ("p50_tpot_ms", 1),
    "TPOT p99": ("p99_tpot_ms", 4),
}


@dataclass(frozen=True)
class Change:
    """One condition in both results."""

    condition: Condition
    ratios: dict[str, Ratio]  # each of SHOWN after / before
    worse: list[str]  # one text for each regression
    verdict: Literal["worse", "faster", "same"]


@dataclass(frozen=True)
class Comparison:
    changes: list[Change]
    missing: list[tuple[Condition, str]]  # measured before, not after, and why
    notes: list[str]

    @property
    def worse(self) -> bool:
        return bool(self.missing or any(change.worse for change in self.changes))

    def table(self) -> Table:
        table = Table(box=None, padding=(0, 1, 0, 0), title="after / before", title_justify="left")
        table.add_column("cell", no_wrap=True)
        for name in SHOWN:
            table.add_column(name, justify="right")
        table.add_column("verdict")
        for change in self.changes:
            ratios = (number(ratio.median, ".2f") for ratio in change.ratios.values())
            table.add_row(change.condition.label, *ratios, change.verdict, style=STYLES[change.verdict])
        return table

    def lines(self) -> list[str]:
        lines = [f"{condition.label}: {reason}" for condition, reason in self.missing]
        lines += [f"{change.condition.label}: {text}" for change in self.changes for text in change.worse]
        worse = sum(bool(change.worse) for change in self.changes)
        total = f"{worse} worse of {len(self.changes)} compared, {len(self.missing)} failed or missing"
        return [*self.notes, *lines, total]


def compare(before: list[CellResult], after: list[CellResult], tolerance: float = 0.05) -> Comparison:
    """Compare condition by condition. One repeat shows no spread, so for it the tolerances decide alone.

    Raises:
        ToolError: no cell is in both, or other work was measured, or on other hardware.
    """
    here, there = (sorted({device(result.hardware) for result in results}) for results in (before, after))
    if here != there:
        raise ToolError(f"measured on {' and '.join(here)}, then on {' and '.join(there)}: not comparable")
    old, new = ({p.condition: p for p in points(results)} for results in (before, after))
    common = [condition for condition in old if condition in new]
    if not common:
        raise ToolError("no cell is in both results")
    failures = {result.cell.condition: result.reason for result in after if not result.ok}
    missing = [(c, f"failed: {failures[c]}" if c in failures else "is missing") for c in old if c not in new]
    more = [c for c in common if new[c].failed > old[c].failed]
    missing += [(c, f"{old[c].failed} repeats failed before, {new[c].failed} now") for c in more]
    bases = [without_speculation(points_of.values()) for points_of in (old, new)]
    changes, notes = [], []
    for c in common:
        a, b = old[c], new[c]
        if _configured(a, "dataset") != _configured(b, "dataset"):
            raise ToolError(f"{c.label}: other prompts or lengths in the two results: not comparable")
        texts = [
            same_texts(point, base.get((c.dataset, c.concurrency))) for point, base in zip((a, b), bases, strict=True)
        ]
        ratios = {name: b.spread(metric).over(a.spread(metric)) for name, metric in SHOWN.items()}
        speed, worse = ratios["tokens/s"], []
        if speed.falls(tolerance):
            worse.append(f"slower, {speed.median:.2f} of before ({speed.low:.2f}..{speed.high:.2f})")
        for name, (metric, times) in TIMES.items():
            before_ms, after_ms = a.spread(metric), b.spread(metric)
            if before_ms.repeats and not after_ms.repeats:
                worse.append(f"{name} {before_ms.median:.1f} ms -> no sample")
            elif before_ms.over(after_ms).falls(times * tolerance):
                worse.append(f"{name} {before_ms.median:.1f} -> {after_ms.median:.1f} ms")
        lengths = a.spread("acceptance_length"), b.spread("acceptance_length")
        text = f"AL {lengths[0].median:.2f} -> {lengths[1].median:.2f}"
        if ratios["AL"].falls(AL_TOLERANCE):
            worse.append(text)
        elif lengths[0].over(lengths[1]).falls(AL_TOLERANCE) and _configured(a, "serve") == _configured(b, "serve"):
            worse.append(f"{text} with the same serving command: tokens may be accepted wrongly")
        if (a.exact or b.exact) and texts[0] > 0 and not texts[1] >= texts[0]:
            worse.append(f"same text as without speculation {_percent(texts[0])} -> {_percent(texts[1])}, in float32")
        faster = speed.low > 1 and speed.median > 1 + tolerance
        changes.append(Change(c, ratios, worse, "worse" if worse else "faster" if faster else "same"))
    if any(change.ratios["tokens/s"].repeats < 2 for change in changes):
        notes.append(f"Some cells have one repeat: their noise is unknown, a loss above {tolerance:.0%} counts.")
    return Comparison(changes, missing, notes)


def _percent(share: float) -> str:
    return "unknown" if math.isnan(share) else f"{100 * share:.4g}%"


def _configured(point: Point, part: str) -> set[str]:
    """A part of the cells' configuration; points whose ``dataset`` differs measure different work."""
    return {json.dumps(cell.configuration.get(part), sort_keys=True) for cell in point.cells}
