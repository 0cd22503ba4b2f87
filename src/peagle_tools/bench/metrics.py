"""Metrics of a cell, medians with spread over repeats, and ratios between arms.

Rates and percentiles are those that ``vllm bench serve`` wrote; docs/bench.md states every formula.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from peagle_tools.bench.cells import CellResult, Condition

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Metrics:
    """One cell. Times in milliseconds at p50, p90, p99; NaN where nothing was sampled.

    Attributes:
        output_tokens_per_second: output tokens of all requests / seconds from the first request to the last answer.
        ttft: from sending a request to its first token.
        tpot: (latency - TTFT) / (output tokens - 1), one value a request.
        acceptance_length: 1 + accepted draft tokens / drafts; the bonus token is the 1. 1 without speculation.
        acceptance: share of drafts whose token at position 1..K was accepted.
        texts: hashes of the answers, in the order of the prompts.
    """

    output_tokens_per_second: float
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    acceptance_length: float
    acceptance: tuple[float, ...]
    texts: tuple[str, ...]


def metrics_of(result: CellResult) -> Metrics:
    """Metrics of a cell that is ok."""
    raw, drafts = result.raw, result.drafts

    def times(name: str, sampled: bool = True) -> tuple[float, ...]:  # vLLM writes 0 where it has no sample
        return tuple(raw[f"p{p}_{name}_ms"] if sampled else math.nan for p in PERCENTILES)

    return Metrics(
        output_tokens_per_second=raw["output_throughput"],
        ttft=times("ttft"),
        tpot=times("tpot", any(tokens > 1 for tokens in raw["output_lens"])),
        acceptance_length=drafts.length if drafts else 1.0,
        acceptance=drafts.shares if drafts else (),
        texts=tuple(raw.get("texts_sha256", ())),
    )


def number(value: float, form: str = ",.0f") -> str:
    return "" if math.isnan(value) else format(value, form)


@dataclass(frozen=True)
class Spread:
    """A value over repeats: median, smallest, largest."""

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, samples: Iterable[float]) -> "Spread":
        known = [value for value in samples if not math.isnan(value)]
        if not known:
            return cls(math.nan, math.nan, math.nan, 0)
        return cls(float(np.median(known)), min(known), max(known), len(known))

    def over(self, other: "Spread") -> "Ratio":
        """This over ``other``, with the range that their spreads allow."""
        pairs = (self.median, other.median), (self.low, other.high), (self.high, other.low)
        median, low, high = (a / b if b else math.nan for a, b in pairs)
        return Ratio(median, low, high, min(self.repeats, other.repeats))

    def text(self, form: str = ",.0f") -> str:
        """``median (low..high)``; the range is left out where it is not seen."""
        median, low, high = (number(value, form) for value in (self.median, self.low, self.high))
        return median if low == high else f"{median} ({low}..{high})"


@dataclass(frozen=True)
class Ratio(Spread):
    """A ratio of medians. It is *in doubt* when its range holds 1, or when one repeat shows no spread at all."""

    @property
    def overlaps_one(self) -> bool:
        return self.low <= 1 <= self.high

    @property
    def in_doubt(self) -> bool:
        return self.overlaps_one or self.repeats < 2

    def lost(self, tolerance: float) -> bool:
        """Below 1 beyond noise: the whole range is, and the median by more than ``tolerance``."""
        return self.high < 1 and self.median < 1 - tolerance

    def text(self, form: str = ".2f") -> str:
        """``1.23 (1.20..1.31)``, with a question mark where it is in doubt."""
        return f"{self.median:{form}}{'?' if self.in_doubt else ''} ({self.low:{form}}..{self.high:{form}})"

    def sure(self) -> str:
        """The range, and whether the ratio is in doubt."""
        return f"{'in doubt: ' * self.in_doubt}{self.low:.2f}..{self.high:.2f} over {self.repeats} repeats"


@dataclass(frozen=True)
class Point(Condition):
    """All repeats of one condition."""

    kind: str
    cells: tuple[Metrics, ...]
    repeats: int  # that were run, failed ones included
    exact: bool = False  # float32 at temperature 0: speculation may change no text

    @property
    def failed(self) -> int:
        return self.repeats - len(self.cells)

    def spread(self, name: str, at: int | None = None) -> Spread:
        """A metric by its field name; ``at`` is an index into a tuple of values."""
        samples = [getattr(cell, name) for cell in self.cells]
        if at is not None:
            samples = [sample[at] if at < len(sample) else math.nan for sample in samples]
        return Spread.of(samples)

    @property
    def tokens_per_second(self) -> Spread:
        return self.spread("output_tokens_per_second")

    @property
    def acceptance(self) -> list[float]:
        """Median share accepted at each position."""
        return [self.spread("acceptance", i).median for i in range(self.k)]


def points(results: Iterable[CellResult]) -> list[Point]:
    """Cells gathered over repeats, in the order in which they come. Conditions without a whole cell are left out."""
    groups: defaultdict[Condition, list[CellResult]] = defaultdict(list)
    for result in results:
        groups[result.cell.condition].append(result)
    found = []
    for condition, members in groups.items():
        if whole := tuple(metrics_of(result) for result in members if result.ok):
            exact = _exact(members[0].configuration)
            found.append(Point(**vars(condition), kind=members[0].kind, cells=whole, repeats=len(members), exact=exact))
    return found


def _exact(configuration: dict[str, Any]) -> bool:
    """Whether the commands say float32 and temperature 0."""
    words = " ".join([*configuration.get("serve", ()), *configuration.get("bench", ()), ""]).replace("=", " ")
    return "--dtype float32 " in words and any(f"--temperature {zero} " in words for zero in ("0", "0.0"))


def same_texts(point: Point, base: Point | None) -> float:
    """Share of requests answered with the same text as without speculation, in the worst repeat; NaN when unknown."""
    wanted = base.cells[0].texts if base else ()
    shares = [sum(map(operator.eq, cell.texts, wanted)) / len(wanted) for cell in point.cells if wanted and cell.texts]
    return min(shares, default=math.nan)


def without_speculation(points: Iterable[Point]) -> dict[tuple[str, int], Point]:
    """The points without speculation by data set and concurrency."""
    return {(p.dataset, p.concurrency): p for p in points if p.kind == "none"}


def by_dataset(points: Iterable[Point]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for point in points:
        found.setdefault(point.dataset, []).append(point)
    return found


def best_depth(candidates: Iterable[Point]) -> Point:
    """The point with the most output tokens per second."""
    return max(candidates, key=lambda point: point.tokens_per_second.median)


@dataclass(frozen=True)
class BestRow:
    """One concurrency: each arm at its best depth, and the ratios between arms."""

    concurrency: int
    best: dict[str, Point]  # by arm
    ratios: dict[tuple[str, str], Ratio]  # by the two arms


def best_rows(points: Sequence[Point]) -> list[BestRow]:
    """For each concurrency P-EAGLE / EAGLE-3, the first P-EAGLE arm / others of its kind, all / no speculation."""
    rows = []
    for concurrency in sorted({p.concurrency for p in points}):
        here = [p for p in points if p.concurrency == concurrency]
        best = {arm: best_depth(p for p in here if p.arm == arm) for arm in dict.fromkeys(p.arm for p in here)}
        parallel, eagle, none = ([a for a in best if best[a].kind == kind] for kind in ("P-EAGLE", "EAGLE-3", "none"))
        pairs = [(a, b) for a in parallel for b in eagle]
        pairs += [(parallel[0], b) for b in parallel[1:]]
        pairs += [(a, b) for b in none for a in best if a not in none]
        ratios = {(a, b): best[a].tokens_per_second.over(best[b].tokens_per_second) for a, b in pairs}
        rows.append(BestRow(concurrency, best, ratios))
    return rows
