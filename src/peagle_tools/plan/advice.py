"""What follows from the model: the best K, the break-even concurrency, the schedule, and when not to speculate."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from peagle_tools.plan.model import Costs, speedup, throughput
from peagle_tools.plan.profile import Profile

LOW_ACCEPTANCE = 0.4  # the textbook's limit: "below alpha of about 0.4, speedup vanishes"


@dataclass(frozen=True)
class Outlook:
    """What to choose from, and how well it is known.

    Attributes:
        depths: to choose from; no speculation is always among them.
        error: two rates closer than this share count as equal.
        corrections: K -> (requests, measured / model) of its cells, rising in requests: measured cells win.
        hypothetical: ``profile`` is not the measured one.
    """

    costs: Costs
    profile: Profile
    depths: Sequence[int]
    error: float = 0.0
    corrections: Mapping[int, Sequence[tuple[int, float]]] = field(default_factory=dict)
    hypothetical: bool = False

    def rate(self, requests: int, k: int) -> float:
        """Tokens/s: at a measured cell what was measured, between cells the model, scaled to both."""
        cells = self.corrections.get(k, [(1, 1.0)])
        factor = np.interp(requests, [c for c, _ in cells], [factor for _, factor in cells])
        return throughput(self.costs, self.profile, requests, k) * float(factor)

    def is_measured(self, requests: int, k: int) -> bool:
        return not self.hypothetical and requests in dict(self.corrections.get(k, ()))


@dataclass(frozen=True)
class Choice:
    """The depth for one number of requests in flight; K = 0 means no speculation."""

    requests: int
    k: int
    speedup: float
    tokens_per_second: float
    close: tuple[int, ...]  # other depths that the error does not tell from the fastest
    measured: bool


def choose(outlook: Outlook, requests: int) -> Choice:
    """The smallest depth, thus the cheapest, among those that ``error`` does not tell from the fastest."""
    rates = {k: outlook.rate(requests, k) for k in sorted({0, *outlook.depths})}
    equal = [k for k, rate in rates.items() if rate >= (1 - outlook.error) * max(rates.values())]
    k = equal[0]
    measured = outlook.is_measured(requests, k) and outlook.is_measured(requests, 0)
    return Choice(requests, k, rates[k] / rates[0], rates[k], tuple(equal[1:]), measured)


def break_even(outlook: Outlook, up_to: int) -> int | None:
    """The smallest number of requests at which no depth gains anything; None when there is none up to ``up_to``."""
    return next((b for b in range(1, up_to + 1) if choose(outlook, b).k == 0), None)


def schedule(outlook: Outlook, up_to: int) -> list[tuple[int, int, int]]:
    """vLLM's ``num_speculative_tokens_per_batch_size``: (first batch size, last, K), ends included, K = 0 allowed."""
    ranges = []
    for k, members in itertools.groupby(range(1, up_to + 1), key=lambda requests: choose(outlook, requests).k):
        sizes = list(members)
        ranges.append((sizes[0], sizes[-1], k))
    return ranges


def whole_config(arm: Mapping[str, Any], ranges: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """``--speculative-config`` of an arm as the suite has it, with K and schedule; empty when speculation never pays.

    One K throughout needs no schedule, and on V1 a schedule would cost the full CUDA graphs.
    """
    deepest = max(k for _, _, k in ranges)
    if deepest == 0:
        return {}
    more = (arm.get("overrides") or {}).get(str(deepest), {})
    config = {**arm["speculative_config"], **more, "num_speculative_tokens": deepest}
    if len(ranges) > 1:
        config["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in ranges]
    return config


def why_not(outlook: Outlook, requests: int) -> str:
    """One sentence: why speculation does not pay at this number of requests; empty where it does."""
    costs, profile, found = outlook.costs, outlook.profile, choose(outlook, requests)
    if found.k:
        return ""
    if found.close:
        return f"what K={max(found.close)} gains there is within the error of {outlook.error:.0%}"
    k = max(outlook.depths, key=lambda depth: speedup(costs, profile, requests, depth))
    alone, draft, first = costs.target(requests), costs.draft_ms(k), profile.shares(1)[0]
    steps = costs.round_ms(requests, k) / alone
    if first < LOW_ACCEPTANCE:
        cause = f"acceptance is low: the first draft token is accepted {first:.0%} of the time"
    elif draft > alone * (profile.length(k) - 1):
        cause = f"the target is small: drafting takes {draft:.1f} ms beside its step of {alone:.1f} ms"
    else:
        cause = "the batch is large: drafting and verifying more tokens costs as much as it gains"
    return f"at K={k} a round takes {steps:.2f} steps and yields {profile.length(k):.2f} tokens; {cause}"
