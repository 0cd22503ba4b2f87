"""``bench compare A B``, the regression gate: what is worse in B, beyond noise. docs/bench.md has the rules."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from peagle_tools.bench.cells import Results
from peagle_tools.bench.metrics import AL, Point, Ratio, number, points, same_texts
from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.provenance import device

# vLLM's name -> the table's, and how many tolerances a loss may be: tails rest on few requests.
METRICS = {
    "output_throughput": ("tokens/s", 1),
    "p50_ttft_ms": ("TTFT p50", 2),
    "p99_ttft_ms": ("TTFT p99", 4),
    "p50_tpot_ms": ("TPOT p50", 1),
    "p99_tpot_ms": ("TPOT p99", 4),
    AL: ("AL", 1),
}
AL_TOLERANCE = 0.03  # acceptance is no speed: no machine's noise moves it


class Change(NamedTuple):
    """One condition that was measured before."""

    label: str
    ratios: list[Ratio]  # each of METRICS after / before; empty where it is missing now
    worse: list[str]  # one text for each regression


def compare(before: Results, after: Results, tolerance: float = 0.05) -> list[Change]:
    """Compare condition by condition. One repeat shows no spread, so for it the tolerances decide alone.

    ToolError where no cell is in both, or other work was measured, or on other hardware.
    """
    here, there = (device(results.sweep["hardware"]) for results in (before, after))
    if here != there:
        raise ToolError(f"measured on {here}, then on {there}: not comparable")
    old, new = ({p.label: p for p in points(results)} for results in (before, after))
    if not old.keys() & {result.cell.label for result in after.cells}:
        raise ToolError("no cell is in both results")
    texts = same_texts(old.values()), same_texts(new.values())
    failures = {result.cell.label: f"failed: {result.reason}" for result in after.cells if not result.ok}
    changes = []
    for label, a in old.items():
        if label not in new:
            changes.append(Change(label, [], [failures.get(label, "is missing")]))
            continue
        b = new[label]
        if _work(before.sweep, a.dataset) != _work(after.sweep, a.dataset):
            raise ToolError(f"{label}: other target, temperature, prompts or lengths: not comparable")
        worse = list(_losses(a, b, tolerance))
        if b.failed > a.failed:
            worse.append(f"{a.failed} repeats failed before, {b.failed} now")
        same_before, same_now = (shares[label] for shares in texts)
        if (a.exact or b.exact) and same_before > 0 and not same_now >= same_before:
            shares = f"{same_before:.2%} -> {number(same_now, '.2%') or 'unknown'}"
            worse.append(f"same text as without speculation {shares}, in float32")
        changes.append(Change(label, [b.spread(metric).over(a.spread(metric)) for metric in METRICS], worse))
    return changes


def _work(sweep: dict[str, Any], dataset: str) -> Any:
    """What was measured."""
    suite = sweep["suite"]
    target = Path(suite["target"]).name  # without the folder it is in
    return target, suite["temperature"], suite["datasets"][dataset], sweep["prompts"].get(dataset)


def _losses(a: Point, b: Point, tolerance: float) -> Iterator[str]:
    for metric, (name, times) in METRICS.items():
        before, after = a.spread(metric), b.spread(metric)
        ratio = before.over(after) if metric.endswith("_ms") else after.over(before)
        if ratio.falls(AL_TOLERANCE if metric == AL else times * tolerance) or (before.repeats and not after.repeats):
            yield f"{name} {before.text('.4g')} -> {after.text('.4g') or 'no sample'}"


def show(console: Console, changes: Sequence[Change]) -> None:
    """Print the ratios, then a line for each regression."""
    columns = [Column(name.replace(" ", "\n"), justify="right") for name, _ in METRICS.values()]
    table = Table("cell", *columns, "", box=None, padding=(0, 1, 0, 0), title="after / before", title_justify="left")
    for label, ratios, worse in changes:
        shown = [number(ratio.median, ".2f") for ratio in ratios] or [""] * len(columns)
        table.add_row(escape(label), *shown, "[bold red]worse" if worse else "")
    console.print(table)
    for label, _, worse in changes:
        for text in worse:
            print(f"{label}: {text}")
    print(f"{sum(bool(worse) for _, _, worse in changes)} of {len(changes)} cells are worse, failed or missing")
