"""``bench compare A B``: which cells got slower beyond noise. The regression gate."""

from dataclasses import dataclass

from rich.table import Table

from peagle_vllm.bench import BenchError
from peagle_vllm.bench.cells import CellResult, Condition
from peagle_vllm.bench.metrics import Ratio, points
from peagle_vllm.provenance import device

STYLES = {"slower": "bold red", "faster": "green", "same": ""}


@dataclass(frozen=True)
class Change:
    """One condition in both results. ``ratio`` is throughput after / before."""

    condition: Condition
    ratio: Ratio
    verdict: str  # slower, faster, same


@dataclass(frozen=True)
class Comparison:
    changes: list[Change]
    lost: list[tuple[Condition, str]]  # measured before, not after, and why
    notes: list[str]

    @property
    def slower(self) -> list[Change]:
        return [change for change in self.changes if change.verdict == "slower"]

    @property
    def worse(self) -> bool:
        return bool(self.lost or self.slower)

    def table(self) -> Table:
        table = Table("cell", box=None, padding=(0, 2, 0, 0))
        table.add_column("after / before", justify="right")
        table.add_column("range", justify="right")
        table.add_column("verdict")
        for change in self.changes:
            r = change.ratio
            row = (change.condition.label, f"{r.median:.2f}", f"{r.low:.2f}..{r.high:.2f}", change.verdict)
            table.add_row(*row, style=STYLES[change.verdict])
        return table

    def lines(self) -> list[str]:
        found = [f"{condition.label}: {reason}" for condition, reason in self.lost]
        found += [f"{c.condition.label}: slower, {c.ratio.median:.2f} of before" for c in self.slower]
        total = f"{len(self.slower)} slower, {len(self.lost)} lost, of {len(self.changes)} compared"
        return [*self.notes, *found, total]


def compare(
    before: list[CellResult], after: list[CellResult], *, tolerance: float = 0.05, other_hardware: bool = False
) -> Comparison:
    """Compare throughput, condition by condition.

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
    old, new = ({p.condition: p for p in points(results)} for results in (before, after))
    common = [condition for condition in old if condition in new]
    if not common:
        raise BenchError("no cell is in both results")
    for condition in common:
        if _prompts(before, condition) != _prompts(after, condition):
            raise BenchError(f"{condition.label}: other prompts or lengths in the two results: not comparable")
    failures = {result.cell.condition: result.reason for result in after if not result.ok}
    lost = [(c, f"failed: {failures[c]}" if c in failures else "is missing") for c in old if c not in new]
    lost += [
        (c, f"{old[c].failed} repeats failed before, {new[c].failed} now")
        for c in common
        if new[c].failed > old[c].failed
    ]
    ratios = {c: new[c].tokens_per_second.over(old[c].tokens_per_second) for c in common}
    if any(ratio.repeats < 2 for ratio in ratios.values()):
        notes.append(f"Some cells have one repeat: their noise is unknown, a loss above {tolerance:.0%} counts.")
    return Comparison([Change(c, ratio, _verdict(ratio, tolerance)) for c, ratio in ratios.items()], lost, notes)


def _verdict(ratio: Ratio, tolerance: float) -> str:
    if ratio.high < 1 and ratio.median < 1 - tolerance:
        return "slower"
    return "faster" if ratio.low > 1 and ratio.median > 1 + tolerance else "same"


def _prompts(results: list[CellResult], condition: Condition) -> set[str]:
    """What the cells were sent; results that differ here measure different work."""
    return {str(sorted(r.configuration["dataset"].items())) for r in results if r.cell.condition == condition and r.ok}
