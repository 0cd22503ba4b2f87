"""Metrics of a cell, medians with spread over repeats, and ratios between arms.

A metric is named as ``vllm bench serve`` writes it; docs/bench.md states every formula.
"""

import math
import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from peagle_tools.bench.cells import CellResult, Condition, Results

AL = "spec_decode_acceptance_length"


def metric(raw: dict[str, Any], name: str) -> float:
    """A metric of what vLLM wrote about a cell; NaN where nothing was sampled."""
    if name.endswith("_tpot_ms") and max(raw["output_lens"]) < 2:
        return math.nan  # vLLM writes 0
    if name == AL and (accepted := raw.get("spec_decode_accepted_tokens", 0)):
        # vLLM's own leaves out the steps without drafts: those for which n-gram found none, or a schedule wanted none.
        steps = sum(raw["output_lens"]) - len(raw["output_lens"]) - accepted
        return 1 + accepted / max(raw["spec_decode_num_drafts"], steps)
    return 1.0 if name == AL else raw[name]


def number(value: float, form: str = ",.0f") -> str:
    return "" if math.isnan(value) else format(value, form)


@dataclass(frozen=True)
class Spread:
    """A value over repeats: median, smallest, largest."""

    median: float
    low: float
    high: float
    repeats: int

    def over(self, other: "Spread") -> "Ratio":
        """This over ``other``, with the range that their spreads allow."""

        def ratio(a: float, b: float) -> float:
            return a / b if b else math.nan

        low, high = ratio(self.low, other.high), ratio(self.high, other.low)
        return Ratio(ratio(self.median, other.median), low, high, min(self.repeats, other.repeats))

    def text(self, form: str = ",.0f") -> str:
        """``median (low..high)``; the range is left out where it is not seen."""
        low, high = number(self.low, form), number(self.high, form)
        return number(self.median, form) + (f" ({low}..{high})" if low != high else "")


@dataclass(frozen=True)
class Ratio(Spread):
    """A ratio of medians. It is *in doubt* when its range holds 1, or when one repeat shows no spread at all."""

    @property
    def overlaps_one(self) -> bool:
        return self.low <= 1 <= self.high

    def falls(self, tolerance: float) -> bool:
        """Below 1 beyond noise: the whole range is, and the median by more than ``tolerance``."""
        return self.high < 1 and self.median < 1 - tolerance

    def text(self, form: str = ".2f") -> str:
        """``1.23 (1.20..1.31)``, with a question mark where it is in doubt."""
        doubt = "?" if self.overlaps_one or self.repeats < 2 else ""
        return f"{self.median:{form}}{doubt} ({self.low:{form}}..{self.high:{form}})"


@dataclass(frozen=True)
class Point(Condition):
    """All repeats of one condition, as many as were run, and the whole cells among them, at least one."""

    cells: list[CellResult]
    repeats: int
    exact: bool  # float32 and temperature 0: speculation may change no text

    @property
    def failed(self) -> int:
        return self.repeats - len(self.cells)

    def spread(self, name: str) -> Spread:
        known = [value for cell in self.cells if not math.isnan(value := metric(cell.raw, name))]
        if not known:
            return Spread(math.nan, math.nan, math.nan, 0)
        return Spread(float(np.median(known)), min(known), max(known), len(known))

    @property
    def tokens_per_second(self) -> Spread:
        return self.spread("output_throughput")

    @property
    def acceptance(self) -> list[float]:
        """Median share of drafts whose token was accepted, at each position."""
        shares = [cell.raw.get("spec_decode_per_position_acceptance_rates", ()) for cell in self.cells]
        return [float(np.median(of_position)) for of_position in zip(*shares, strict=False)]


by_speed = operator.attrgetter("tokens_per_second.median")  # of points, for ``max`` and ``sorted``


def points(results: Results) -> list[Point]:
    """Cells gathered over repeats, in their order. Conditions without a whole cell are left out."""
    suite, gathered = results.sweep["suite"], []
    for _, members in groupby(results.cells, key=lambda result: result.cell.label):
        cells = list(members)
        here = cells[0].cell
        flags = f"{suite['serve']['flags']} {suite['arms'][here.arm]['flags']} ".replace("=", " ")
        exact = "--dtype float32 " in flags and suite["temperature"] == 0
        if whole := [cell for cell in cells if cell.ok]:
            gathered.append(Point(here.arm, here.k, here.dataset, here.concurrency, whole, len(cells), exact))
    return gathered


def without_speculation(points: Iterable[Point]) -> dict[tuple[str, int], Point]:
    """The points without speculation by data set and concurrency, of several arms the fastest."""
    return {(p.dataset, p.concurrency): p for p in sorted(points, key=by_speed) if not p.k}


def same_texts(points: Collection[Point]) -> dict[str, float]:
    """By label the share of requests answered as without speculation, in the worst repeat; NaN when unknown."""
    bases = without_speculation(points)
    worst = {}
    for point in points:
        base = bases.get((point.dataset, point.concurrency))
        wanted = base.cells[0].raw["texts_sha256"] if base else ()
        answers = [cell.raw["texts_sha256"] for cell in point.cells]
        shares = [sum(map(operator.eq, texts, wanted)) / len(wanted) for texts in answers if wanted and texts]
        worst[point.label] = min(shares, default=math.nan)
    return worst
