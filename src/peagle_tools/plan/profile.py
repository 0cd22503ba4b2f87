"""Acceptance profiles: the share of drafts accepted at each position, and the acceptance length they give.

    AL(K) = 1 + s_1 + ... + s_K        s_i: share of drafts whose first i tokens were all accepted; the 1 is the bonus

With one acceptance rate alpha at every position s_i = alpha^i, so AL(K) = (1 - alpha^(K+1)) / (1 - alpha).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from peagle_tools.bench import BenchError


@dataclass(frozen=True)
class Profile:
    """What is known about acceptance.

    Attributes:
        by_k: shares by position, as they were at each depth K they are known for; a parallel drafter's shares differ
            slightly with K.
        tail: each position beyond the deepest known one is accepted this often, given that the one before was.
    """

    by_k: Mapping[int, tuple[float, ...]]
    tail: float

    @property
    def deepest(self) -> int:
        """The largest K whose shares are known and not extrapolated."""
        return max(self.by_k)

    def shares(self, k: int) -> tuple[float, ...]:
        """Shares at positions 1..k: measured at k, else cut from the next larger depth, else extrapolated."""
        if k <= self.deepest:
            return tuple(self.by_k[min(known for known in self.by_k if known >= k)][:k])
        known = self.by_k[self.deepest]
        return (*known, *(known[-1] * self.tail**i for i in range(1, k - len(known) + 1)))

    def length(self, k: int) -> float:
        """AL(k), bonus token included."""
        return 1 + math.fsum(self.shares(k))


def from_alpha(alpha: float) -> Profile:
    """The textbook's profile: every position is accepted with the same probability."""
    if not 0 <= alpha <= 1:
        raise BenchError(f"alpha={alpha:g}: a probability lies in 0..1")
    return Profile({1: (alpha,)}, alpha)


def from_shares(by_k: Mapping[int, Sequence[float]]) -> Profile:
    """Measured shares by depth. Beyond them each position keeps the mean conditional rate of positions 2..K (the first
    position is another task: it sees a real token and hidden state)."""
    if not by_k:
        raise BenchError("an acceptance profile needs at least one share")
    checked = {}
    for k, shares in by_k.items():
        if len(shares) != k or not shares:
            raise BenchError(f"K={k} needs {k} shares, got {len(shares)}")
        if any(not 0 <= s <= 1 for s in shares) or any(b > a + 1e-9 for a, b in itertools.pairwise(shares)):
            raise BenchError(f"shares accepted at positions 1..{k} lie in 0..1 and never rise; got {list(shares)}")
        checked[k] = tuple(shares)
    last = checked[max(checked)]
    if len(last) == 1 or not last[0]:
        return Profile(checked, last[0])
    return Profile(checked, (last[-1] / last[0]) ** (1 / (len(last) - 1)))


def from_lengths(lengths: Mapping[int, float]) -> Profile:
    """Published acceptance lengths at some depths; between and beyond them s_i = s_1 r^(i-1).

    s_1 and r are found from the smallest and the largest depth. Each given AL is kept exactly: at that depth the
    shares are scaled to it.
    """
    for k, value in lengths.items():
        if not 1 <= value <= k + 1:
            raise BenchError(f"AL {value:g} at K={k} lies outside 1..{k + 1}")
    if not lengths:
        raise BenchError("no acceptance length was given")
    ratio, by_k = _decay(lengths), {}
    for k in range(1, max(lengths) + 1):
        exact = k if k in lengths else min(lengths)
        scale = (lengths[exact] - 1) / math.fsum(ratio**i for i in range(exact))
        by_k[k] = tuple(scale * ratio**i for i in range(k))
    return Profile(by_k, ratio)


def _decay(lengths: Mapping[int, float]) -> float:
    """r that gives the ratio of the two lengths, bonus tokens left out; one length alone: s_1 = r, too."""
    low, high = min(lengths), max(lengths)
    r = np.linspace(1e-6, 1, 100_001)

    def series(k: int) -> np.ndarray:
        return sum((r**i for i in range(k)), np.zeros_like(r))

    if low == high:
        return float(np.interp(lengths[high] - 1, r * series(high), r))
    wanted = (lengths[high] - 1) / (lengths[low] - 1) if lengths[low] > 1 else 1.0
    return float(np.interp(wanted, series(high) / series(low), r))


def parse(text: str) -> Profile:
    """``alpha=0.7``, ``0.74,0.56,0.42`` (shares at positions 1, 2, 3), or ``al:3=2.87,7=3.70``.

    Raises:
        BenchError: it is none of them.
    """
    try:
        if text.startswith("alpha="):
            return from_alpha(float(text.removeprefix("alpha=")))
        if text.startswith("al:"):
            pairs = [part.split("=") for part in text.removeprefix("al:").split(",")]
            return from_lengths({int(k): float(value) for k, value in pairs})
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        raise BenchError(f"{text!r} is no profile: give alpha=0.7, or 0.74,0.56,0.42, or al:3=2.87,7=3.70") from None
    return from_shares({len(shares): shares})
