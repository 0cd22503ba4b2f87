"""Costs and acceptance of one arm, from measured cells."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from peagle_tools.bench import BenchError
from peagle_tools.bench.metrics import Point
from peagle_tools.plan.advice import Outlook
from peagle_tools.plan.model import Costs, Target, throughput
from peagle_tools.plan.profile import Profile, from_shares

ASSUMED_ERROR = 0.1


@dataclass(frozen=True)
class Fitted:
    """One arm on one data set.

    Attributes:
        depths: the K whose cells were used; the others were kept for judging.
        known_to: the largest concurrency with cells of the arm and without speculation.
        assumed: a sentence about what the cells do not determine; empty where they determine all.
    """

    arm: str
    dataset: str
    costs: Costs
    profile: Profile
    depths: tuple[int, ...]
    known_to: int
    assumed: str = ""


@dataclass(frozen=True)
class Judged:
    """A measured cell beside what the model predicts for it."""

    point: Point
    predicted: float  # tokens/s
    used: bool  # the cell took part in the fit

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted / self.point.tokens_per_second.median - 1


def round_ms(point: Point) -> float:
    """Milliseconds of a mean round: each of c requests gets AL tokens in it."""
    length = point.spread("acceptance_length").median
    return 1000 * point.concurrency * length / point.tokens_per_second.median


def fit(points: Sequence[Point], arm: str, dataset: str, depths: Sequence[int] = ()) -> Fitted:
    """Fit one arm; ``depths`` restricts which of its cells are used.

    Raises:
        BenchError: cells that the fit needs are missing.
    """
    here = [p for p in points if p.dataset == dataset]
    base = sorted((p for p in here if p.kind == "none"), key=lambda p: p.concurrency)
    if not base:
        raise BenchError(f"{dataset}: no cells without speculation; the planner needs them for the target's own cost")
    mine = [p for p in here if p.arm == arm and p.k and (not depths or p.k in depths)]
    if not mine:
        at = f" at K={', '.join(map(str, depths))}" if depths else ""
        raise BenchError(f"{dataset}: {arm} has no cells{at}")
    for cells, what in ((base, "no speculation"), (mine, arm)):
        if len(known := {p.concurrency for p in cells}) < 2:
            raise BenchError(
                f"{dataset}: {what} has cells at c={min(known)} only, and one concurrency does not show what a larger "
                "batch costs; measure a second one"
            )
    target = Target(tuple((float(p.concurrency), round_ms(p)) for p in base))
    costs, assumed = _costs(mine, target)
    used = sorted({p.k for p in mine})
    alone = {k: min((p for p in mine if p.k == k), key=lambda p: p.concurrency) for k in used}
    profile = from_shares({k: point.acceptance for k, point in alone.items()})
    known_to = min(max(p.concurrency for p in cells) for cells in (base, mine))
    return Fitted(arm, dataset, costs, profile, tuple(used), known_to, assumed)


def _costs(mine: Sequence[Point], target: Target) -> tuple[Costs, str]:
    """Least squares on relative errors. Also what had to be assumed, because one depth cannot tell a draft forward of
    a sequential draft from the cost of a round that speculates at all."""
    totals = np.array([round_ms(p) for p in mine])
    extra = totals - [target(p.concurrency) for p in mine]
    ks = np.array([float(p.k) for p in mine])
    columns = {"once": np.ones(len(mine)), "forward": ks, "per_token": ks * [p.concurrency for p in mine]}
    known: dict[str, float] = {}
    assumed, share = "", mine[0].layers_share
    if mine[0].kind == "P-EAGLE":
        known["forward"] = 0.0  # the one forward is in ``once``
    elif len(set(ks)) == 1 and share is None:
        known["once"] = 0.0
        assumed = "One depth, layers unknown: all that a round adds is taken to grow with K."
    elif len(set(ks)) == 1 and share is not None:
        known["forward"] = share * target(1)
        assumed = f"One depth: a draft forward is taken to cost its share of layers of the target's step, {share:.2f}."
    left = extra - sum(value * columns.pop(name) for name, value in known.items())
    known |= dict(zip(columns, non_negative(columns.values(), left, 1 / totals), strict=True))
    return Costs(target, **known), assumed


def non_negative(columns: Iterable[ArrayLike], wanted: ArrayLike, weights: ArrayLike) -> tuple[float, ...]:
    """Weighted least squares with coefficients that are not negative, for a handful of columns: the best of the
    solutions with some of them held at zero."""
    matrix = np.transpose(list(columns)) * np.asarray(weights)[:, None]
    scaled = np.asarray(wanted) * weights
    best, best_error = np.zeros(matrix.shape[1]), np.inf
    for chosen in itertools.product((False, True), repeat=matrix.shape[1]):
        free, solution = np.array(chosen), np.zeros(matrix.shape[1])
        solution[free] = np.linalg.lstsq(matrix[:, free], scaled)[0]
        error = float(np.sum((matrix @ solution - scaled) ** 2))
        if solution.min() >= 0 and error < best_error - 1e-15:
            best, best_error = solution, error
    return tuple(best.tolist())


def outlook(fitted: Fitted, judged: Sequence[Judged], depths: Sequence[int], profile: Profile | None) -> Outlook:
    """What to choose from. Its error is the larger of the model's own on the arm's cells (root mean square, by degrees
    of freedom; ``ASSUMED_ERROR`` where they leave none) and half the range that repeats of a cell have."""
    mine = [j for j in judged if j.point.k]
    costs = fitted.costs
    freedom = len(mine) - sum(value > 0 for value in (costs.once, costs.forward, costs.per_token))
    squares = sum(j.error**2 for j in mine)
    noise = [(s.high - s.low) / 2 / s.median for j in mine if (s := j.point.tokens_per_second).repeats > 1]
    error = max(math.sqrt(squares / freedom) if freedom > 0 else ASSUMED_ERROR, float(np.median(noise or [0.0])))
    corrections: dict[int, list[tuple[int, float]]] = {}
    for j in sorted(judged, key=lambda j: j.point.concurrency):
        corrections.setdefault(j.point.k, []).append((j.point.concurrency, 1 / (1 + j.error)))
    return Outlook(costs, profile or fitted.profile, depths, error, corrections, profile is not None)


def judge(fitted: Fitted, points: Sequence[Point]) -> list[Judged]:
    """Every measured cell of the arm and of no speculation beside its prediction."""
    found = []
    for p in points:
        if p.dataset != fitted.dataset or (p.arm != fitted.arm and p.kind != "none"):
            continue
        used = p.kind == "none" or p.k in fitted.depths
        found.append(Judged(p, throughput(fitted.costs, fitted.profile, p.concurrency, p.k), used))
    return found
