"""The published figures, beside which measured ones are put. Data in published.json, each with source and hardware."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path

from pydantic import TypeAdapter

from peagle_tools.bench.metrics import Point, best_rows

# Said before anything was measured. The sources name neither prompts nor lengths; a wrong mask token, rope or layer
# costs far more than this.
AL_TOLERANCE = 0.05


@dataclass(frozen=True)
class Published:
    """One published benchmark of one target on one data set.

    Attributes:
        acceptance_length: by arm kind, then K.
        tokens_per_second: by arm kind ("none" has K 0), then K, then concurrency; empty where only ratios are known.
        ratios: P-EAGLE / EAGLE-3 in output tokens per second, best K each, by concurrency.
        best_k: by arm kind, as the source states it.
    """

    target: str
    dataset: str
    hardware: str
    source: str
    acceptance_length: dict[str, dict[int, float]] = field(default_factory=dict)
    tokens_per_second: dict[str, dict[int, dict[int, float]]] = field(default_factory=dict)
    ratios: dict[int, float] = field(default_factory=dict)
    best_k: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.target}, {self.dataset}"

    def beside(self, points: Sequence[Point]) -> list[tuple[str, str, str]]:
        """Name, published and measured value of each ratio, acceptance length and rate."""
        rows = []

        def add(name: str, value: str, measured: Iterable[str]) -> None:
            rows.append((name, value, next(iter(measured), "not measured")))

        ratios = {row.concurrency: row.parallel_over_sequential() for row in best_rows(points)}
        for c, value in self.ratios.items():
            add(f"P-EAGLE / EAGLE-3, c={c}", f"{value:.2f}", (r.text() for r in (ratios.get(c),) if r))
        for kind, by_k in self.acceptance_length.items():
            for k, value in by_k.items():
                als = (f"{p.spread('acceptance_length').median:.2f}" for p in points if (p.kind, p.k) == (kind, k))
                add(f"AL, {kind} K={k}", f"{value:.2f}", als)
        for kind, rates in self.tokens_per_second.items():
            for k, by_c in rates.items():
                for c, value in by_c.items():
                    here = (p for p in points if (p.kind, p.k, p.concurrency) == (kind, k, c))
                    name = f"tokens/s, {kind}{f' K={k}' if k else ''}, c={c}"
                    add(name, f"{value:,.0f}", (p.tokens_per_second.text() for p in here))
        return rows


@dataclass(frozen=True)
class Check:
    """A published acceptance length beside the measured one of one arm."""

    text: str
    passed: bool


def expected(target: str, datasets: Sequence[str], points: Sequence[Point]) -> list[Check]:
    """Every published AL of P-EAGLE on these data sets, in every P-EAGLE arm, over all its cells.

    EAGLE-3 is left out: the sources do not name its heads. A figure that was not measured has not passed.
    """
    checks = []
    for dataset in datasets:
        arms = list(dict.fromkeys(p.arm for p in points if p.kind == "P-EAGLE")) or ["P-EAGLE"]
        figures = [found.acceptance_length.get("P-EAGLE", {}) for found in matching(target, dataset)]
        for arm, (k, value) in product(arms, (pair for by_k in figures for pair in by_k.items())):
            mine = [p for p in points if (p.arm, p.k, p.dataset) == (arm, k, dataset)]
            lengths = [cell.acceptance_length for p in mine for cell in p.cells]
            worst = max(lengths, key=lambda length: abs(length - value), default=None)
            passed = worst is not None and abs(worst / value - 1) <= AL_TOLERANCE
            found = "not measured" if worst is None else f"measured {worst:.2f} ({worst / value - 1:+.1%})"
            verdict = "pass" if passed else f"FAIL (allowed: {AL_TOLERANCE:.0%})"
            checks.append(Check(f"{arm} K={k}, {dataset}: published AL {value:.2f}, {found}: {verdict}", passed))
    return checks


@cache
def published() -> tuple[Published, ...]:
    file = Path(__file__).with_name("published.json")
    return TypeAdapter(tuple[Published, ...]).validate_json(file.read_bytes())


def matching(target: str, dataset: str) -> list[Published]:
    """Published figures of this target (by its model name) on this data set."""

    def plain(name: str) -> str:
        return "".join(c for c in name.rsplit("/", 1)[-1].lower() if c.isalnum()).removesuffix("fp8")

    return [p for p in published() if plain(p.target) == plain(target) and plain(p.dataset) == plain(dataset)]
