"""The published figures, beside which measured ones are put. Data in published.json, each with source and hardware."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter

FILE = Path(__file__).with_name("published.json")


@dataclass(frozen=True)
class Published:
    """One published benchmark of one target on one data set.

    Attributes:
        acceptance_length: by arm kind, then K.
        tokens_per_second: by arm kind ("none" has K 0), then K, then concurrency; empty where only ratios are known.
        ratios: P-EAGLE / EAGLE-3 in output tokens per second, best K each, by concurrency.
        best_k: by arm kind, in the words of the source.
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


@cache
def published() -> tuple[Published, ...]:
    return TypeAdapter(tuple[Published, ...]).validate_json(FILE.read_bytes())


def matching(target: str, dataset: str) -> list[Published]:
    """Published figures of this target (by its model name) on this data set."""

    def plain(name: str) -> str:
        return "".join(c for c in name.rsplit("/", 1)[-1].lower() if c.isalnum()).removesuffix("fp8")

    return [p for p in published() if plain(p.target) == plain(target) and plain(p.dataset) == plain(dataset)]
