"""``bench compare A B``: which cells got slower beyond noise. The regression gate."""

from collections.abc import Iterable
from dataclasses import dataclass

from rich.table import Table

from peagle_vllm.bench import BenchError
from peagle_vllm.bench.cells import CellResult
from peagle_vllm.bench.metrics import Point, Ratio, points
from peagle_vllm.provenance import device

Key = tuple[str, int, str, int]


@dataclass(frozen=True)
class Change:
    """One point in both results. ``ratio`` is throughput after / before."""

    key: Key
    ratio: Ratio
    verdict: str  # slower, faster, same


@dataclass(frozen=True)
class Comparison:
    changes: list[Change]
    lost: list[tuple[Key, str]]  # measured before, not after, and why
    notes: list[str]

    @property
    def worse(self) -> bool:
        return bool(self.lost) or any(change.verdict == "slower" for change in self.changes)

    def table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in ("cell", "after / before", "range", "verdict"):
            table.add_column(name, justify="right" if name in ("after / before", "range") else "left")
        styles = {"slower": "bold red", "faster": "green", "same": ""}
        for change in self.changes:
            r = change.ratio
            row = (_name(change.key), f"{r.value:.2f}", f"{r.low:.2f}..{r.high:.2f}", change.verdict)
            table.add_row(*row, style=styles[change.verdict])
        return table

    def lines(self) -> list[str]:
        slower = [change for change in self.changes if change.verdict == "slower"]
        found = [f"{_name(key)}: {why}" for key, why in self.lost]
        found += [f"{_name(c.key)}: slower, {c.ratio.value:.2f} of before" for c in slower]
        return [*self.notes, *found, f"{len(slower)} slower, {len(self.lost)} lost, of {len(self.changes)} compared"]


def _name(key: Key) -> str:
    arm, k, dataset, concurrency = key
    return f"{arm}{f' K={k}' if k else ''}, {dataset}, c={concurrency}"


def compare(
    before: list[CellResult], after: list[CellResult], *, tolerance: float = 0.05, other_hardware: bool = False
) -> Comparison:
    """Compare throughput, cell by cell.

    A cell is slower when its best repeat after is below its worst repeat before (the spreads are disjoint), and its
    median lost more than ``tolerance``. A cell with one repeat shows no spread, so for it ``tolerance`` decides alone.

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
    old, new = _by_key(points(before)), _by_key(points(after))
    common = [key for key in old if key in new]
    if not common:
        raise BenchError("no cell is in both results")
    for key in common:
        if _tokens(before, key) != _tokens(after, key):
            raise BenchError(f"{_name(key)}: other prompts or lengths in the two results: not comparable")
    if any(min(old[key].tokens_per_second.repeats, new[key].tokens_per_second.repeats) < 2 for key in common):
        notes.append(f"Some cells have one repeat: their noise is unknown, a loss above {tolerance:.0%} counts.")
    changes = [_change(key, new[key].tokens_per_second.over(old[key].tokens_per_second), tolerance) for key in common]
    failures = {_key(result): result.reason for result in after if not result.ok}
    lost = [(key, f"failed: {failures[key]}" if key in failures else "is missing") for key in old if key not in new]
    lost += [
        (
            key,
            f"{old[key].asked - len(old[key].cells)} repeats failed before, {new[key].asked - len(new[key].cells)} now",
        )
        for key in common
        if new[key].asked - len(new[key].cells) > old[key].asked - len(old[key].cells)
    ]
    return Comparison(changes, lost, notes)


def _change(key: Key, ratio: Ratio, tolerance: float) -> Change:
    verdict = "same"
    if ratio.high < 1 and ratio.value < 1 - tolerance:
        verdict = "slower"
    elif ratio.low > 1 and ratio.value > 1 + tolerance:
        verdict = "faster"
    return Change(key, ratio, verdict)


def _key(result: CellResult) -> Key:
    c = result.cell
    return (c.arm, c.k, c.dataset, c.concurrency)


def _by_key(found: Iterable[Point]) -> dict[Key, Point]:
    return {(p.arm, p.k, p.dataset, p.concurrency): p for p in found}


def _tokens(results: list[CellResult], key: Key) -> set[str]:
    """What a cell was asked for; results that differ here measure different work."""
    return {str(sorted(r.configuration["dataset"].items())) for r in results if _key(r) == key and r.ok}
