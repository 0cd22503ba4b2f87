"""The planner tried on published figures: does it choose the depths that the publications found best?

Inputs that were published: acceptance lengths of gpt-oss-20b (vLLM blog), and how a target's step grows with the
number of requests on a B200 (the baseline column of the AWS JumpStart post, Qwen3-Coder-30B). Everything else is an
assumption, listed in ``ASSUMED`` and printed. Nothing is fitted to the choices or ratios that are judged.

What verifying K + 1 rows of a request costs was not published. Two bounds stand for it, both the textbook's:

    free    verifying costs what a decode step of the same requests costs (the step is bound by weights)
    full    each row costs what a request of its own would cost ("K tokens at batch 1 take the time of batch K")
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from peagle_vllm.bench.published import Published, published
from peagle_vllm.plan.acceptance import Profile, from_lengths
from peagle_vllm.plan.model import Target

Bound = Literal["free", "full"]
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

    dataset: str
    concurrency: int
    best: Mapping[tuple[str, Bound], int]  # (arm kind, bound) -> K
    ratio: Mapping[Bound, float]
    published: float
    extrapolated: bool  # "full" needs more requests than the published baseline has


def baseline() -> Target:
    """Step time against requests, in units of the step at one request."""
    rates = next(
        p.tokens_per_second["none"][0] for p in published() if p.dataset == "SPEED-Bench code" and p.tokens_per_second
    )
    one = 1 / rates[1]
    return Target(tuple((float(c), c / rate / one) for c, rate in sorted(rates.items())))


def round_cost(target: Target, kind: str, draft_cost: float, bound: Bound, requests: int, k: int) -> float:
    """A round in target steps at batch 1."""
    verify = target(requests * (k + 1) if bound == "full" else requests)
    return verify + draft_cost * (1 if kind == "P-EAGLE" else k)


def best_depth(target: Target, profile: Profile, kind: str, draft_cost: float, bound: Bound, requests: int) -> int:
    def rate(k: int) -> float:
        return profile.length(k) / round_cost(target, kind, draft_cost, bound, requests, k)

    return max(DEPTHS, key=rate)


def profiles(figures: Published) -> dict[str, Profile]:
    return {kind: from_lengths(lengths) for kind, lengths in figures.acceptance_length.items()}


def verdicts(
    figures: Published, acceptance: Mapping[str, Profile] | None = None, draft_cost: Mapping[str, float] = DRAFT_COST
) -> list[Verdict]:
    """The model's answers for one published table; ``acceptance`` replaces its profiles (to see what that changes)."""
    target, acceptance = baseline(), acceptance or profiles(figures)
    last = target.points[-1][0]
    found = []
    bounds: tuple[Bound, Bound] = ("free", "full")
    for concurrency, ratio in figures.ratios.items():
        best: dict[tuple[str, Bound], int] = {}
        ratios: dict[Bound, float] = {}
        for bound in bounds:
            rates = {}
            for kind, profile in acceptance.items():
                k = best_depth(target, profile, kind, draft_cost[kind], bound, concurrency)
                best[kind, bound] = k
                cost = round_cost(target, kind, draft_cost[kind], bound, concurrency, k)
                rates[kind] = profile.length(k) / cost
            ratios[bound] = rates["P-EAGLE"] / rates["EAGLE-3"]
        deep = concurrency * (max(DEPTHS) + 1) > last
        found.append(Verdict(figures.dataset, concurrency, best, ratios, ratio, deep))
    return found


def holds_from(figures: Published, kind: str = "EAGLE-3", k: int = 3, requests: int = 1) -> float:
    """The smallest draft cost (in target steps, verifying free) from which ``k`` is the best depth: how far the
    assumed cost may be off. Infinite when no cost up to a whole target step makes it so."""
    target, profile = baseline(), profiles(figures)[kind]
    for step in range(1001):
        if best_depth(target, profile, kind, step / 1000, "free", requests) == k:
            return step / 1000
    return float("inf")


def judged() -> list[Published]:
    """The published tables that state both acceptance lengths and the best depths."""
    return [p for p in published() if p.acceptance_length and p.best_k]
