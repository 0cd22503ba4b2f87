"""The throughput model. A round of B requests at depth K yields B AL(K) tokens and takes

    parallel (P-EAGLE):     T(B, K) = target(B) + fixed + per_token K B          one draft forward
    sequential (EAGLE-3):   T(B, K) = target(B) + K (fixed + per_token B)        K draft forwards
    no speculation:         T(B, 0) = target(B)

``fixed`` is what a draft forward costs whatever its size; ``per_token`` what one more drafted token costs, drafting
and verifying it together. Cells cannot tell those two apart, and no choice of K depends on how they split.

    tokens/s(B, K) = 1000 B AL(K) / T(B, K)        T in milliseconds
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

from peagle_vllm.plan.acceptance import Profile

Drafting = Literal["parallel", "sequential"]


@dataclass(frozen=True)
class Target:
    """Milliseconds of a step without speculation, by requests in flight; straight lines between known points."""

    points: tuple[tuple[float, float], ...]  # (requests, ms), rising in requests

    def __call__(self, requests: float) -> float:
        """Beyond the last point the last slope goes on, before the first the step costs what it costs there."""
        xs = [x for x, _ in self.points]
        if requests <= xs[0] or len(xs) == 1:
            return self.points[0][1]
        i = min(bisect_left(xs, requests), len(xs) - 1)
        (x0, y0), (x1, y1) = self.points[i - 1], self.points[i]
        return y0 + (requests - x0) * max(0.0, y1 - y0) / (x1 - x0)


@dataclass(frozen=True)
class Costs:
    """What rounds cost, in milliseconds.

    Attributes:
        per_token: of one drafted token of one request.
    """

    target: Target
    drafting: Drafting
    fixed: float
    per_token: float

    def round_ms(self, requests: float, k: int) -> float:
        if k == 0:
            return self.target(requests)
        if self.drafting == "parallel":
            return self.target(requests) + self.fixed + self.per_token * k * requests
        return self.target(requests) + k * (self.fixed + self.per_token * requests)


def throughput(costs: Costs, profile: Profile, requests: float, k: int) -> float:
    """Output tokens a second of all requests together."""
    return 1000 * requests * (profile.length(k) if k else 1.0) / costs.round_ms(requests, k)


def speedup(costs: Costs, profile: Profile, requests: float, k: int) -> float:
    """Throughput over that without speculation."""
    return throughput(costs, profile, requests, k) / throughput(costs, profile, requests, 0)


def textbook(draft_cost: float, drafting: Drafting = "sequential") -> Costs:
    """The lesson's model: verifying costs one target step, a draft forward ``draft_cost`` of one."""
    return Costs(Target(((1.0, 1.0),)), drafting, fixed=draft_cost, per_token=0.0)
