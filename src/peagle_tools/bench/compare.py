"""``bench compare A B``, the regression gate: what is worse in B, beyond noise. docs/bench.md has the rules."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Column, Table

from peagle_tools.bench.cells import CellResult, Condition
from peagle_tools.bench.metrics import Point, Ratio, number, points, same_texts
from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.provenance import device

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


@dataclass(frozen=True)
class Comparison:
    changes: list[Change]
    missing: list[tuple[Condition, str]]  # measured before, not after, and why

    @property
    def worse(self) -> bool:
        return bool(self.missing or any(change.worse for change in self.changes))

    def table(self) -> Table:
        columns = [Column("cell", no_wrap=True), *(Column(name, justify="right") for name in SHOWN), Column()]
        table = Table(*columns, box=None, padding=(0, 1, 0, 0), title="after / before", title_justify="left")
        for change in self.changes:
            ratios = (number(ratio.median, ".2f") for ratio in change.ratios.values())
            table.add_row(change.condition.label, *ratios, "[bold red]worse" if change.worse else "")
        return table

    def lines(self) -> list[str]:
        lines = [f"{condition.label}: {reason}" for condition, reason in self.missing]
        lines += [f"{change.condition.label}: {text}" for change in self.changes for text in change.worse]
        if any(change.ratios["tokens/s"].repeats < 2 for change in self.changes):
            lines.append("Some cells have one repeat: their noise is unknown, a loss above the tolerance counts.")
        worse = sum(bool(change.worse) for change in self.changes)
        return [*lines, f"{worse} worse of {len(self.changes)} compared, {len(self.missing)} failed or missing"]


def compare(before: list[CellResult], after: list[CellResult], tolerance: float = 0.05) -> Comparison:
    """Compare condition by condition. One repeat shows no spread, so for it the tolerances decide alone.

    Raises:
        ToolError: no cell is in both, or other work was measured, or on other hardware.
    """
    here, there = (" and ".join(sorted({device(result.hardware) for result in results})) for results in (before, after))
    if here != there:
        raise ToolError(f"measured on {here}, then on {there}: not comparable")
    old, new = ({p.condition: p for p in points(results)} for results in (before, after))
    common = [condition for condition in old if condition in new]
    if not common:
        raise ToolError("no cell is in both results")
    failures = {result.cell.condition: f"failed: {result.reason}" for result in after if not result.ok}
    missing = [(c, failures.get(c, "is missing")) for c in old if c not in new]
    more = [c for c in common if new[c].failed > old[c].failed]
    missing += [(c, f"{old[c].failed} repeats failed before, {new[c].failed} now") for c in more]
    texts = same_texts(old.values()), same_texts(new.values())
    changes = []
    for c in common:
        a, b = old[c], new[c]
        if _configured(a, "dataset") != _configured(b, "dataset"):
            raise ToolError(f"{c.label}: other prompts or lengths in the two results: not comparable")
        worse = [*_slower(a, b, tolerance), *_other_acceptance(a, b)]
        same_before, same_now = (shares[c] for shares in texts)
        if (a.exact or b.exact) and same_before > 0 and not same_now >= same_before:
            shares = f"{same_before:.2%} -> {number(same_now, '.2%') or 'unknown'}"
            worse.append(f"same text as without speculation {shares}, in float32")
        ratios = {name: b.spread(metric).over(a.spread(metric)) for name, metric in SHOWN.items()}
        changes.append(Change(c, ratios, worse))
    return Comparison(changes, missing)


def _slower(a: Point, b: Point, tolerance: float) -> Iterator[str]:
    speed = b.tokens_per_second.over(a.tokens_per_second)
    if speed.falls(tolerance):
        yield f"slower, {speed.median:.2f} of before ({speed.low:.2f}..{speed.high:.2f})"
    for name, (metric, times) in TIMES.items():
        before, after = a.spread(metric), b.spread(metric)
        if before.repeats and not after.repeats:
            yield f"{name} {before.median:.1f} ms -> no sample"
        elif before.over(after).falls(times * tolerance):
            yield f"{name} {before.median:.1f} -> {after.median:.1f} ms"


def _other_acceptance(a: Point, b: Point) -> Iterator[str]:
    before, after = a.spread("acceptance_length"), b.spread("acceptance_length")
    text = f"AL {before.median:.2f} -> {after.median:.2f}"
    if after.over(before).falls(AL_TOLERANCE):
        yield text
    elif before.over(after).falls(AL_TOLERANCE) and _configured(a, "serve") == _configured(b, "serve"):
        yield f"{text} with the same serving command: tokens may be accepted wrongly"


def _configured(point: Point, part: str) -> set[str]:
    """A part of the cells' configuration; points whose ``dataset`` differs measure different work."""
    return {json.dumps(cell.configuration.get(part), sort_keys=True) for cell in point.cells}
