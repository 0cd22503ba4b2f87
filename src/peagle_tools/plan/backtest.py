"""The planner on published figures: does it choose the depths that the publications found best?

Inputs that were published: acceptance lengths of gpt-oss-20b (vLLM blog), and how a target's step grows with the
number of requests on a B200 (the baseline column of the AWS JumpStart post, Qwen3-Coder-30B). Everything else is an
assumption, listed in ``ASSUMED`` and printed. Nothing is fitted to the choices or ratios that are judged.

What verifying K + 1 rows of a request costs was not published. Two bounds stand for it, both the textbook's:

    free    verifying costs what a decode step of the same requests costs (the step is bound by weights)
    full    each row costs what a request of its own would cost ("K tokens at batch 1 take the time of batch K")
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from peagle_tools.bench.published import Published, published
from peagle_tools.plan.model import Target
from peagle_tools.plan.profile import Profile, from_lengths

Bound = Literal["free", "full"]
BOUNDS: tuple[Bound, Bound] = ("free", "full")
DEPTHS = (3, 5, 7)  # what the blog swept

# gpt-oss-20b: hidden 2880, 201,088 tokens, 3.6e9 parameters active for a token. A draft layer of that width (attention
# and an MLP) has about 0.1e9, the head's own output matrix, full vocabulary, 201,088 x 2880 = 0.58e9.
ACTIVE, LAYER, OUTPUT = 3.6e9, 0.1e9, 201_088 * 2880
DRAFT_COST = {"P-EAGLE": (4 * LAYER + OUTPUT) / ACTIVE, "EAGLE-3": (LAYER + OUTPUT) / ACTIVE}

ASSUMED = (
    "The target's step grows with the number of requests as Qwen3-Coder-30B's does on a B200 "
    "(the only published baseline; both are mixtures of experts with about 3e9 active parameters).",
    f"A draft forward costs its share of the target's active parameters: P-EAGLE (4 layers, published) "
    f"{DRAFT_COST['P-EAGLE']:.2f} of a target step at batch 1, EAGLE-3 (1 layer, assumed) {DRAFT_COST['EAGLE-3']:.2f}; "
    "both with a full-vocabulary output matrix; the same at every batch size.",
    "K=5 has no published acceptance length: a geometric profile through K=3 and K=7 stands in.",
    "Prefill, sampling and the server cost all arms alike.",
    "Verifying K + 1 rows of a request costs what a step without speculation costs. Then the deepest parallel draft "
    "always wins, so the choice for P-EAGLE rests on this; the last column shows the other extreme, where each "
    "verified row costs as much as a request.",
)


@dataclass(frozen=True)
class Verdict:
    """The model's best depth at one concurrency, under both bounds.

    Attributes:
        ratio: P-EAGLE / EAGLE-3 in tokens/s at the model's best depths, by bound; ``published`` is what was measured.
    """

    concurrency: int
    best: Mapping[tuple[str, Bound], int]  # (arm kind, bound) -> K
    ratio: Mapping[Bound, float]
    published: float
    extrapolated: bool  # "full" needs more requests than the published baseline has


def baseline() -> Target:
    """Step time against requests, in units of the step at one request."""
    rates = next(p.tokens_per_second["none"][0] for p in published() if 128 in p.ratios)
    return Target(tuple((float(c), c * rates[1] / rate) for c, rate in sorted(rates.items())))


def best_depth(
    target: Target, profile: Profile, kind: str, draft_cost: float, bound: Bound, requests: int
) -> tuple[float, int]:
    """Tokens of a request for the time of a target step at batch 1, and the depth that yields them."""

    def rate(k: int) -> float:
        verify = target(requests * (k + 1) if bound == "full" else requests)
        return profile.length(k) / (verify + draft_cost * (1 if kind == "P-EAGLE" else k))

    best = max(DEPTHS, key=rate)
    return rate(best), best


def profiles(figures: Published) -> dict[str, Profile]:
    return {kind: from_lengths(lengths) for kind, lengths in figures.acceptance_length.items()}


def verdicts(figures: Published) -> list[Verdict]:
    """The model's choices for one published table."""
    target, acceptance, found = baseline(), profiles(figures), []
    for c, ratio in figures.ratios.items():
        best = {
            (kind, bound): best_depth(target, profile, kind, DRAFT_COST[kind], bound, c)
            for kind, profile in acceptance.items()
            for bound in BOUNDS
        }
        depths = {key: k for key, (_, k) in best.items()}
        ratios = {bound: best["P-EAGLE", bound][0] / best["EAGLE-3", bound][0] for bound in BOUNDS}
        extrapolated = c * (max(DEPTHS) + 1) > target.points[-1][0]
        found.append(Verdict(c, depths, ratios, ratio, extrapolated))
    return found


def chosen(found: Sequence[Verdict], kind: str, bound: Bound) -> str:
    """``K=7 at c=1, 2, K=5 at c=4``: the model's depths of this kind of arm."""
    depths = dict.fromkeys(v.best[kind, bound] for v in found)
    where = {k: ", ".join(str(v.concurrency) for v in found if v.best[kind, bound] == k) for k in depths}
    return ", ".join(f"K={k} at c={numbers}" for k, numbers in where.items())


def holds_from(figures: Published, kind: str = "EAGLE-3", k: int = 3) -> float:
    """The smallest draft cost (in target steps, verifying free, one request) from which ``k`` is the best depth: how
    far the assumed cost may be off. Infinite when no cost up to a whole target step makes it so."""
    target, profile = baseline(), profiles(figures)[kind]
    costs = np.arange(0, 1.001, 0.001).tolist()
    return next((cost for cost in costs if best_depth(target, profile, kind, cost, "free", 1)[1] == k), float("inf"))


def judged() -> list[Published]:
    """The published tables that state both acceptance lengths and the best depths."""
    return [p for p in published() if p.acceptance_length and p.best_k]
