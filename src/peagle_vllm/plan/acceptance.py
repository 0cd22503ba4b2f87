"""Acceptance profiles: the share of drafts accepted at each position, and the acceptance length they give.

    AL(K) = 1 + s_1 + ... + s_K        s_i: share of drafts whose first i tokens were all accepted; the 1 is the bonus

With one acceptance rate alpha at every position s_i = alpha^i, so AL(K) = (1 - alpha^(K+1)) / (1 - alpha).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class ProfileError(ValueError):
    """A profile that cannot be; the message says how to mend it."""


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
        deeper = [known for known in self.by_k if known >= k]
        if deeper:
            return tuple(self.by_k[min(deeper)][:k])
        found = list(self.by_k[self.deepest])
        while len(found) < k:
            found.append(found[-1] * self.tail)
        return tuple(found)

    def length(self, k: int) -> float:
        """AL(k), bonus token included."""
        return 1 + math.fsum(self.shares(k))


def from_alpha(alpha: float) -> Profile:
    """The textbook's profile: every position is accepted with the same probability."""
    if not 0 <= alpha <= 1:
        raise ProfileError(f"alpha={alpha:g}: a probability lies in 0..1")
    return Profile({1: (alpha,)}, alpha)


def from_shares(by_k: Mapping[int, Sequence[float]]) -> Profile:
    """Measured shares by depth. Beyond them each position keeps the mean conditional rate of positions 2..K (the first
    position is another task: it sees a real token and hidden state)."""
    if not by_k:
        raise ProfileError("an acceptance profile needs at least one share")
    checked = {}
    for k, shares in by_k.items():
        if len(shares) != k or not shares:
            raise ProfileError(f"K={k} needs {k} shares, got {len(shares)}")
        if any(not 0 <= s <= 1 for s in shares) or any(b > a + 1e-9 for a, b in itertools.pairwise(shares)):
            raise ProfileError(f"shares accepted at positions 1..{k} lie in 0..1 and never rise; got {list(shares)}")
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
            raise ProfileError(f"AL {value:g} at K={k} lies outside 1..{k + 1}")
    if not lengths:
        raise ProfileError("no acceptance length was given")
    low, high = min(lengths), max(lengths)
    ratio = _ratio(lengths, low, high)
    by_k = {}
    for k in range(1, high + 1):
        shape = [ratio**i for i in range(k)]
        if k in lengths:
            scale = (lengths[k] - 1) / math.fsum(shape)
        else:
            scale = (lengths[low] - 1) / math.fsum(ratio**i for i in range(low))
        by_k[k] = tuple(scale * part for part in shape)
    return Profile(by_k, ratio)


def _ratio(lengths: Mapping[int, float], low: int, high: int) -> float:
    """r with sum_high / sum_low as given, by bisection; one length alone says nothing, so then s_i = alpha^i."""

    def gap(r: float) -> float:
        if low == high:
            return math.fsum(r ** (i + 1) for i in range(high)) - (lengths[high] - 1)
        wanted = (lengths[high] - 1) / (lengths[low] - 1) if lengths[low] > 1 else 1.0
        return math.fsum(r**i for i in range(high)) / math.fsum(r**i for i in range(low)) - wanted

    a, b = 1e-6, 1.0
    if gap(a) >= 0:
        return a
    for _ in range(80):
        middle = (a + b) / 2
        a, b = (middle, b) if gap(middle) < 0 else (a, middle)
    return (a + b) / 2


def parse(text: str) -> Profile:
    """``alpha=0.7``, ``0.74,0.56,0.42`` (shares at positions 1, 2, 3), or ``al:3=2.87,7=3.70``.

    Raises:
        ProfileError: it is none of them.
    """
    try:
        if text.startswith("alpha="):
            return from_alpha(float(text.removeprefix("alpha=")))
        if text.startswith("al:"):
            pairs = [part.split("=") for part in text.removeprefix("al:").split(",")]
            return from_lengths({int(k): float(value) for k, value in pairs})
        shares = [float(part) for part in text.split(",")]
    except ProfileError:
        raise
    except ValueError:
        raise ProfileError(f"{text!r} is no profile: say alpha=0.7, or 0.74,0.56,0.42, or al:3=2.87,7=3.70") from None
    return from_shares({len(shares): shares})
