"""The published figures, beside which measured ones are put. Data in published.json, each with source and hardware."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

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
    acceptance_length: dict[str, dict[int, float]]
    tokens_per_second: dict[str, dict[int, dict[int, float]]]
    ratios: dict[int, float]
    best_k: dict[str, int]

    @property
    def name(self) -> str:
        return f"{self.target}, {self.dataset}"


@cache
def published() -> tuple[Published, ...]:
    def ints(table: dict[str, Any]) -> dict[int, Any]:
        return {int(key): ints(value) if isinstance(value, dict) else value for key, value in table.items()}

    found = []
    for entry in json.loads(FILE.read_text()):
        found.append(
            Published(
                target=entry["target"],
                dataset=entry["dataset"],
                hardware=entry["hardware"],
                source=entry["source"],
                acceptance_length={kind: ints(t) for kind, t in entry.get("acceptance_length", {}).items()},
                tokens_per_second={kind: ints(t) for kind, t in entry.get("tokens_per_second", {}).items()},
                ratios=ints(entry.get("ratios", {})),
                best_k=entry.get("best_k", {}),
            )
        )
    return tuple(found)


def matching(target: str, dataset: str) -> list[Published]:
    """Published figures of this target (by its model name) on this data set."""

    def plain(name: str) -> str:
        return "".join(c for c in name.rsplit("/", 1)[-1].lower() if c.isalnum()).removesuffix("fp8")

    return [p for p in published() if plain(p.target) == plain(target) and plain(p.dataset) == plain(dataset)]
