"""What follows from the model: the best K, the break-even concurrency, the schedule, and when not to speculate."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass

from peagle_vllm.plan.model import Costs, speedup, throughput
from peagle_vllm.plan.profile import Profile

LOW_ACCEPTANCE = 0.4  # the textbook's limit: "below alpha of about 0.4, speedup vanishes"


@dataclass(frozen=True)
class Choice:
    """The depth for one number of requests in flight; K = 0 means no speculation."""

    requests: int
    k: int
    speedup: float
    tokens_per_second: float
    close: tuple[int, ...]  # other depths within 3%


def choose(costs: Costs, profile: Profile, requests: int, depths: Sequence[int]) -> Choice:
    """The depth with the most tokens/s; the smaller one where two are equal."""
    rates = {k: throughput(costs, profile, requests, k) for k in sorted({0, *depths})}
    best = max(rates, key=lambda k: (rates[k], -k))
    close = tuple(k for k, rate in rates.items() if k != best and rate > 0.97 * rates[best])
    return Choice(requests, best, rates[best] / rates[0], rates[best], close)


def break_even(costs: Costs, profile: Profile, depths: Sequence[int], up_to: int) -> int | None:
    """The smallest number of requests at which no depth gains anything; None when there is none up to ``up_to``."""
    return next((b for b in range(1, up_to + 1) if choose(costs, profile, b, depths).k == 0), None)


def schedule(costs: Costs, profile: Profile, depths: Sequence[int], max_num_seqs: int) -> list[tuple[int, int, int]]:
    """vLLM's ``num_speculative_tokens_per_batch_size``: (first batch size, last, K), ends included, K = 0 allowed."""
    ranges = []
    batch_sizes = range(1, max_num_seqs + 1)
    for k, members in itertools.groupby(batch_sizes, key=lambda requests: choose(costs, profile, requests, depths).k):
        sizes = list(members)
        ranges.append((sizes[0], sizes[-1], k))
    return ranges


def schedule_json(ranges: Sequence[tuple[int, int, int]]) -> str:
    """Entries for ``--speculative-config``, ready to paste; empty when speculation never pays."""
    deepest = max(k for _, _, k in ranges)
    if deepest == 0:
        return ""
    config = {
        "num_speculative_tokens": deepest,
        "num_speculative_tokens_per_batch_size": [list(entry) for entry in ranges],
    }
    return json.dumps(config)[1:-1]


def why_not(costs: Costs, profile: Profile, requests: int, depths: Sequence[int]) -> str:
    """One sentence: why speculation does not pay at this number of requests; empty where it does."""
    if choose(costs, profile, requests, depths).k:
        return ""
    k = max(depths, key=lambda depth: speedup(costs, profile, requests, depth))
    alone, draft, first = costs.target(requests), costs.draft_ms(k), profile.shares(1)[0]
    steps = costs.round_ms(requests, k) / alone
    if first < LOW_ACCEPTANCE:
        cause = f"acceptance is low: the first draft token is accepted {first:.0%} of the time"
    elif draft > alone * (profile.length(k) - 1):
        cause = f"the target is small: drafting takes {draft:.1f} ms beside its step of {alone:.1f} ms"
    else:
        cause = "the batch is large: drafting and verifying more tokens costs as much as it gains"
    return f"at K={k} a round takes {steps:.2f} steps and yields {profile.length(k):.2f} tokens; {cause}"
