"""Metrics of a cell from its raw samples, and medians with spread over repeats.

docs/benchmarking.md states every formula; the definitions are vLLM's (``vllm/benchmarks/serve.py``), so that a
number here is the number that `vllm bench serve` prints.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from peagle_vllm.bench.cells import CellResult

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Metrics:
    """One cell. Times in milliseconds at p50, p90, p99; NaN where nothing was sampled.

    Attributes:
        output_tokens_per_second: output tokens of all requests / seconds from the first request to the last answer.
        tokens_per_second_per_user: the above / concurrency (vLLM's Pareto plot has the same axis).
        ttft: from sending a request to its first token.
        tpot: (latency - TTFT) / (output tokens - 1), one value a request.
        itl: between two pieces of one answer; a piece carries a whole round's tokens, or more (--stream-interval).
        acceptance_length: 1 + accepted draft tokens / drafts; the bonus token is the 1. 1 without speculation.
        acceptance: share of drafts whose token at position 1..K was accepted.
        eager_draft_steps: share of draft steps that ran without a CUDA graph, 0..1; NaN where they are not counted.
        kv_use: the largest share of the KV cache that was seen in use, 0..1.
        gpu_memory_mib: the most GPU memory that was seen in use.
    """

    output_tokens_per_second: float
    tokens_per_second_per_user: float
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    itl: tuple[float, ...]
    acceptance_length: float
    acceptance: tuple[float, ...]
    eager_draft_steps: float
    kv_use: float
    gpu_memory_mib: float
    texts: tuple[str, ...]  # hashes of the answers, in the order of the prompts


def metrics_of(result: CellResult) -> Metrics:
    """Metrics of a cell that is ok."""
    raw, drafts = result.raw, result.drafts
    rate = raw["total_output_tokens"] / raw["duration"]
    tpot = [
        (latency - ttft) / (tokens - 1)
        for latency, ttft, tokens in zip(raw["latencies"], raw["ttfts"], raw["output_lens"], strict=True)
        if tokens > 1
    ]
    itl = [gap for request in raw["itls"] for gap in request]

    def in_ms(seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(1000 * np.percentile(seconds or [math.nan], PERCENTILES))

    return Metrics(
        output_tokens_per_second=rate,
        tokens_per_second_per_user=rate / result.cell.concurrency,
        ttft=in_ms(raw["ttfts"]),
        tpot=in_ms(tpot),
        itl=in_ms(itl),
        acceptance_length=drafts.length if drafts else 1.0,
        acceptance=drafts.shares if drafts else (),
        eager_draft_steps=result.draft_steps.eager_share if result.draft_steps else math.nan,
        kv_use=max(result.gauges.get("kv_use") or [math.nan]),
        gpu_memory_mib=max(result.gauges.get("gpu_memory_mib") or [math.nan]),
        texts=tuple(raw.get("texts_sha256", ())),
    )


@dataclass(frozen=True)
class Spread:
    """A value over repeats: median, smallest, largest."""

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        known = [value for value in values if not math.isnan(value)]
        if not known:
            return cls(math.nan, math.nan, math.nan, 0)
        return cls(float(np.median(known)), min(known), max(known), len(known))

    def over(self, other: "Spread") -> "Ratio":
        """This over ``other``, with the range that their spreads allow."""
        return Ratio(
            self.median / other.median, self.low / other.high, self.high / other.low, min(self.repeats, other.repeats)
        )


@dataclass(frozen=True)
class Ratio:
    """A speedup. It is *in doubt* when its range holds 1, or when one repeat shows no spread at all."""

    value: float
    low: float
    high: float
    repeats: int

    @property
    def overlaps_one(self) -> bool:
        return self.low <= 1 <= self.high

    @property
    def in_doubt(self) -> bool:
        return self.overlaps_one or self.repeats < 2


@dataclass(frozen=True)
class Point:
    """All repeats of one arm at one depth, data set and concurrency."""

    arm: str
    kind: str
    k: int
    dataset: str
    concurrency: int
    cells: tuple[Metrics, ...]
    asked: int  # repeats that were run, failed ones included
    layers_share: float | None = None  # layers of the head / layers of the target, where both are known

    def spread(self, name: str, at: int | None = None) -> Spread:
        """A metric by its field name; ``at`` is an index into a tuple of values."""
        values = [getattr(cell, name) for cell in self.cells]
        if at is not None:
            values = [value[at] if at < len(value) else math.nan for value in values]
        return Spread.of(values)

    @property
    def tokens_per_second(self) -> Spread:
        return self.spread("output_tokens_per_second")

    @property
    def acceptance(self) -> list[float]:
        """Median share accepted at each position."""
        return [self.spread("acceptance", i).median for i in range(self.k)]


def same_texts(point: Point, base: Point) -> float:
    """Share of requests answered with the same text as without speculation, at temperature 0; NaN when unknown."""
    pairs = list(zip(point.cells[0].texts, base.cells[0].texts, strict=False))
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else math.nan


def points(results: Iterable[CellResult]) -> list[Point]:
    """Cells gathered over repeats, in the order in which they come. Points without a whole cell are left out."""
    groups: dict[tuple[str, int, str, int], list[CellResult]] = {}
    for result in results:
        c = result.cell
        groups.setdefault((c.arm, c.k, c.dataset, c.concurrency), []).append(result)
    found = []
    for (arm, k, dataset, concurrency), members in groups.items():
        whole = tuple(metrics_of(result) for result in members if result.ok)
        if whole:
            layers = members[0].configuration.get("layers", {})
            share = layers["draft"] / layers["target"] if len(layers) == 2 else None
            found.append(Point(arm, members[0].kind, k, dataset, concurrency, whole, len(members), share))
    return found


def best_depth(candidates: Iterable[Point]) -> Point | None:
    """The point with the most output tokens per second: "best K" as the published tables mean it."""
    return max(candidates, key=lambda point: point.tokens_per_second.median, default=None)
