"""The answer of ``plan``: for each data set one arm, over all arms that speculate, and its whole config."""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peagle_tools.bench import BenchError
from peagle_tools.plan.advice import Choice, Outlook, choose, schedule, whole_config
from peagle_tools.plan.fit import Fitted


@dataclass(frozen=True)
class Row:
    """One measured concurrency: the arm that is best there, and its depth."""

    arm: str
    choice: Choice


@dataclass(frozen=True)
class Recommendation:
    """One data set.

    Attributes:
        arm: with the largest mean gain over ``rows``.
        equal: other arms whose mean gain the error does not tell from it.
        config: whole ``--speculative-config``; empty when no arm pays.
        environment: variables without which the server would not run this arm.
        schedule: (first batch size, last, K).
        known_to: the largest measured concurrency.
        error: depths and arms closer than this share count as equal.
    """

    dataset: str
    arm: str
    equal: list[str]
    config: dict[str, Any]
    environment: dict[str, str]
    schedule: list[tuple[int, int, int]]
    known_to: int
    error: float
    rows: list[Row]

    def lines(self) -> Iterator[str]:
        """Plain text and Markdown at once; the config is the last line."""
        if not self.config:
            yield f"{self.dataset}: speculation does not pay at any concurrency here: leave --speculative-config out."
            return
        yield f"{self.dataset}: serve {self.arm}, the best over all arms and measured concurrencies."
        if self.equal:
            yield f"Its lead over {' and '.join(self.equal)} is within the error of {self.error:.0%}."
        for row in self.rows:
            depth = f"{row.arm} K={row.choice.k}" if row.choice.k else "no speculation"
            gain = f"{row.choice.speedup:.2f} x no speculation, {'measured' if row.choice.measured else 'model'}"
            yield f"Best at c={row.choice.requests}: {depth}, {row.choice.tokens_per_second:.0f} tokens/s, {gain}."
        end = self.schedule[-1]
        if end[1] > self.known_to:
            yield f"Beyond c={self.known_to} nothing was measured: what follows for it is extrapolated, as asked."
        else:
            yield f"Beyond c={self.known_to} nothing was measured; vLLM goes on there with the last K, {end[2]}."
        if self.environment:
            yield "With " + " ".join(f"{name}={value}" for name, value in self.environment.items()) + " set."
        yield "--speculative-config (paths as the suite has them):"
        yield json.dumps(self.config)


def recommend(
    dataset: str, plans: Sequence[tuple[Fitted, Outlook]], suite: Mapping[str, Any], up_to: int | None
) -> Recommendation:
    """The best arm of one data set; ``up_to`` schedules beyond what was measured.

    Raises:
        BenchError: sweep.json, which names the arms' models, is missing.
    """
    shared = set.intersection(*({c for c, _ in o.corrections[k]} for _, o in plans for k in o.corrections))
    columns = sorted(shared) or [1]

    def gain(plan: tuple[Fitted, Outlook]) -> float:
        return math.fsum(math.log(choose(plan[1], c).speedup) for c in columns) / len(columns)

    ranked = sorted(plans, key=gain, reverse=True)
    fitted, best = ranked[0]
    equal = [f.arm for f, o in ranked[1:] if gain((f, o)) > gain(ranked[0]) + math.log(1 - best.error)]
    rows = [
        max((Row(f.arm, choose(o, c)) for f, o in ranked), key=lambda row: row.choice.tokens_per_second)
        for c in columns
    ]
    arms = suite.get("arms", {})
    if fitted.arm not in arms:
        raise BenchError(f"sweep.json does not name the model of {fitted.arm}: without it there is no config to print")
    ranges = schedule(best, up_to or fitted.known_to)
    environment = suite.get("serve", {}).get("environment", {}) | arms[fitted.arm].get("environment", {})
    config = whole_config(arms[fitted.arm], ranges)
    return Recommendation(dataset, fitted.arm, equal, config, environment, ranges, fitted.known_to, best.error, rows)


def recommend_all(
    plans: Sequence[tuple[Fitted, Outlook]], suite: Mapping[str, Any], up_to: int | None
) -> list[Recommendation]:
    """One for each data set; ``plans`` come in the order of data sets."""
    groups = itertools.groupby(sorted(plans, key=lambda plan: plan[0].dataset), key=lambda plan: plan[0].dataset)
    return [recommend(dataset, list(members), suite, up_to) for dataset, members in groups]
