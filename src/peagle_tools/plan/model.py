"""The throughput model. A round of B requests at depth K yields B AL(K) tokens and takes

    parallel (P-EAGLE):     T(B, K) = target(B) + once + per_token K B                  one draft forward, in ``once``
    sequential (EAGLE-3):   T(B, K) = target(B) + once + K forward + per_token K B      K draft forwards
    no speculation:         T(B, 0) = target(B)

``once`` is what a round costs more than a step, whatever K; ``forward`` a draft forward, whatever its size;
``per_token`` one more drafted token, drafting and verifying it together. Cells cannot tell those two apart, and no
choice of K depends on how they split.

    tokens/s(B, K) = 1000 B AL(K) / T(B, K)        T in milliseconds
"""

import itertools
from dataclasses import dataclass

from peagle_tools.plan.profile import Profile


@dataclass(frozen=True)
class Target:
    """Milliseconds of a step without speculation, by requests in flight; straight lines between known points."""

    points: tuple[tuple[float, float], ...]  # (requests, ms), rising in requests

    def __call__(self, requests: float) -> float:
        """Between points linear, beyond the last one with the last slope, before the first one constant."""
        pairs = list(itertools.pairwise(self.points))
        if requests <= self.points[0][0] or not pairs:
            return self.points[0][1]
        (x0, y0), (x1, y1) = next((pair for pair in pairs if requests <= pair[1][0]), pairs[-1])
        return y0 + (requests - x0) * max(0.0, y1 - y0) / (x1 - x0)


@dataclass(frozen=True)
class Costs:
    """What rounds cost, in milliseconds.

    Attributes:
        once: of a round that speculates; holds the one forward of a parallel draft.
        forward: of each draft forward of a sequential draft; 0 for a parallel draft.
        per_token: of one drafted token of one request.
    """

    target: Target
    once: float = 0.0
    forward: float = 0.0
    per_token: float = 0.0

    def draft_ms(self, k: int) -> float:
        """What drafting k tokens takes, whatever the batch."""
        return self.once + self.forward * k

    def round_ms(self, requests: float, k: int) -> float:
        if k == 0:
            return self.target(requests)
        return self.target(requests) + self.draft_ms(k) + self.per_token * k * requests


def throughput(costs: Costs, profile: Profile, requests: float, k: int) -> float:
    """Output tokens a second of all requests together."""
    return 1000 * requests * (profile.length(k) if k else 1.0) / costs.round_ms(requests, k)


def speedup(costs: Costs, profile: Profile, requests: float, k: int) -> float:
    """Throughput over that without speculation."""
    return throughput(costs, profile, requests, k) / throughput(costs, profile, requests, 0)


# The textbook's target, in steps instead of milliseconds: verifying costs one, whatever the batch.
ONE_STEP = Target(((1.0, 1.0),))
