"""``bench compare A B``: what is worse in B than in A, beyond noise. The regression gate.

tokens/s, TTFT, TPOT    the ranges over repeats are disjoint, and the median lost more than the tolerance
AL                      the same, with a tolerance of its own; a rise counts too where the serving command is the
                        same, for then another head cannot be its cause
same text               in float32 at temperature 0 it may not fall at all
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from peagle_tools.bench import BenchError
from peagle_tools.bench.cells import CellResult, Condition
from peagle_tools.bench.metrics import Point, Ratio, points, same_texts, without_speculation
from peagle_tools.shared.provenance import device

STYLES = {"worse": "bold red", "faster": "green", "same": ""}
# Time -> metric, which of its percentiles, and how many tolerances may be lost: tails rest on few requests.
TIMES = {"TTFT p50": ("ttft", 0, 2), "TTFT p99": ("ttft", 2, 4), "TPOT p50": ("tpot", 0, 1), "TPOT p99": ("tpot", 2, 4)}


@dataclass(frozen=True)
class Change:
    """One condition in both results.

    Attributes:
        ratio: throughput after / before.
        others: TTFT p50, TPOT p50 and AL after / before.
        worse: one text for each regression.
    """

    condition: Condition
    ratio: Ratio
    others: tuple[Ratio, ...]
    worse: list[str]
    tolerance: float

    @property
    def verdict(self) -> str:
        if self.worse:
            return "worse"
        return "faster" if self.ratio.low > 1 and self.ratio.median > 1 + self.tolerance else "same"


@dataclass(frozen=True)
class Comparison:
    changes: list[Change]
    lost: list[tuple[Condition, str]]  # measured before, not after, and why
    notes: list[str]

    @property
    def worse(self) -> bool:
        return bool(self.lost or any(change.worse for change in self.changes))

    def table(self) -> Table:
        table = Table(box=None, padding=(0, 1, 0, 0), title="after / before", title_justify="left")
        table.add_column("cell", no_wrap=True)
        for name in ("tokens/s", "TTFT p50", "TPOT p50", "AL"):
            table.add_column(name, justify="right")
        table.add_column("verdict")
        for change in self.changes:
            ratios = ("" if math.isnan(r.median) else f"{r.median:.2f}" for r in (change.ratio, *change.others))
            table.add_row(change.condition.label, *ratios, change.verdict, style=STYLES[change.verdict])
        return table

    def lines(self) -> list[str]:
        found = [f"{condition.label}: {reason}" for condition, reason in self.lost]
        found += [f"{change.condition.label}: {text}" for change in self.changes for text in change.worse]
        worse = sum(bool(change.worse) for change in self.changes)
        return [*self.notes, *found, f"{worse} worse, {len(self.lost)} lost, of {len(self.changes)} compared"]


def compare(
    before: list[CellResult],
    after: list[CellResult],
    *,
    tolerance: float = 0.05,
    al_tolerance: float = 0.03,
    other_hardware: bool = False,
) -> Comparison:
    """Compare condition by condition. One repeat shows no spread, so for it the tolerances decide alone.

    Raises:
        BenchError: no cell is in both, or the hardware differs and ``other_hardware`` is false.
    """
    devices = [{device(result.hardware) for result in results} for results in (before, after)]
    notes = []
    if devices[0] != devices[1]:
        text = f"measured on {' and '.join(sorted(devices[0]))}, then on {' and '.join(sorted(devices[1]))}"
        if not other_hardware:
            raise BenchError(f"{text}: not comparable (--other-hardware compares all the same)")
        notes.append(f"Beware: {text}.")
    old, new = ({p.condition: p for p in points(results)} for results in (before, after))
    common = [condition for condition in old if condition in new]
    if not common:
        raise BenchError("no cell is in both results")
    for condition in common:
        if _configured(before, condition, "dataset") != _configured(after, condition, "dataset"):
            raise BenchError(f"{condition.label}: other prompts or lengths in the two results: not comparable")
    failures = {result.cell.condition: result.reason for result in after if not result.ok}
    lost = [(c, f"failed: {failures[c]}" if c in failures else "is missing") for c in old if c not in new]
    lost += [
        (c, f"{old[c].failed} repeats failed before, {new[c].failed} now")
        for c in common
        if new[c].failed > old[c].failed
    ]
    bases = [without_speculation(found.values()) for found in (old, new)]
    changes = []
    for c in common:
        a, b, where = old[c], new[c], (c.dataset, c.concurrency)
        texts = [same_texts(point, base.get(where)) for point, base in zip((a, b), bases, strict=True)]
        same_command = _configured(before, c, "serve") == _configured(after, c, "serve")
        ratio = b.tokens_per_second.over(a.tokens_per_second)
        others = (("ttft", 0), ("tpot", 0), ("acceptance_length", None))
        worse = (
            [f"slower, {ratio.median:.2f} of before ({ratio.low:.2f}..{ratio.high:.2f})"]
            if ratio.lost(tolerance)
            else []
        )
        worse += [*_slower_answers(a, b, tolerance), *_other_drafts(a, b, al_tolerance, same_command)]
        if (a.exact or b.exact) and texts[0] > 0 and not texts[1] >= texts[0]:
            worse.append(f"same text as without speculation {_percent(texts[0])} -> {_percent(texts[1])}, in float32")
        rest = tuple(b.spread(name, at).over(a.spread(name, at)) for name, at in others)
        changes.append(Change(c, ratio, rest, worse, tolerance))
    if any(change.ratio.repeats < 2 for change in changes):
        notes.append(f"Some cells have one repeat: their noise is unknown, a loss above {tolerance:.0%} counts.")
    return Comparison(changes, lost, notes)


def _slower_answers(a: Point, b: Point, tolerance: float) -> Iterator[str]:
    for name, (metric, at, times) in TIMES.items():
        old, new = a.spread(metric, at), b.spread(metric, at)
        if old.repeats and not new.repeats:
            yield f"{name} {old.median:.1f} ms -> no sample"
        elif old.over(new).lost(times * tolerance):
            yield f"{name} {old.median:.1f} -> {new.median:.1f} ms"


def _other_drafts(a: Point, b: Point, tolerance: float, same_command: bool) -> Iterator[str]:
    old, new = a.spread("acceptance_length"), b.spread("acceptance_length")
    if new.over(old).lost(tolerance):
        yield f"AL {old.median:.2f} -> {new.median:.2f}"
    elif same_command and old.over(new).lost(tolerance):
        yield f"AL {old.median:.2f} -> {new.median:.2f} with the same serving command: tokens may be accepted wrongly"


def _percent(share: float) -> str:
    return "unknown" if math.isnan(share) else f"{100 * share:.4g}%"


def _configured(results: list[CellResult], condition: Condition, part: str) -> set[str]:
    """A part of the cells' configuration; results whose ``dataset`` differs measure different work."""
    return {
        json.dumps(r.configuration.get(part), sort_keys=True) for r in results if r.cell.condition == condition and r.ok
    }
