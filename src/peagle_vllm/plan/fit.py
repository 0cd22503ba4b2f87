"""Costs and acceptance of one arm, from measured cells."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from peagle_vllm.bench import BenchError
from peagle_vllm.bench.metrics import Point
from peagle_vllm.plan.acceptance import Profile, from_shares
from peagle_vllm.plan.model import Costs, Target, throughput


@dataclass(frozen=True)
class Fitted:
    """One arm on one data set.

    Attributes:
        depths: the K whose cells were used; the others were kept for judging.
        assumed: what the cells could not tell, in words; empty where they told all.
    """

    arm: str
    dataset: str
    costs: Costs
    profile: Profile
    depths: tuple[int, ...]
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
    target = Target(tuple((float(p.concurrency), round_ms(p)) for p in base))
    costs, assumed = _costs(mine, target)
    by_k = {}
    for k in sorted({p.k for p in mine}):
        lowest = min((p for p in mine if p.k == k), key=lambda p: p.concurrency)
        by_k[k] = lowest.acceptance
    return Fitted(arm, dataset, costs, from_shares(by_k), tuple(by_k), assumed)


def _costs(mine: Sequence[Point], target: Target) -> tuple[Costs, str]:
    """Least squares on relative errors. Also what had to be assumed, because one depth cannot tell a draft forward of
    a sequential draft from the cost of a round that speculates at all."""
    totals = [round_ms(p) for p in mine]
    extra = [total - target(p.concurrency) for p, total in zip(mine, totals, strict=True)]
    weights = [1 / total for total in totals]
    ones, ks, tokens = [1.0] * len(mine), [float(p.k) for p in mine], [float(p.k * p.concurrency) for p in mine]
    if mine[0].kind == "P-EAGLE":
        once, per_token = non_negative([ones, tokens], extra, weights)
        return Costs(target, "parallel", once, 0.0, per_token), ""
    if len(set(ks)) > 1:
        once, forward, per_token = non_negative([ones, ks, tokens], extra, weights)
        return Costs(target, "sequential", once, forward, per_token), ""
    share = mine[0].layers_share
    if share is None:
        forward, per_token = non_negative([ks, tokens], extra, weights)
        words = "One depth, layers unknown: all that a round adds is taken to grow with K."
        return Costs(target, "sequential", 0.0, forward, per_token), words
    forward = share * target(1)
    left = [value - forward * k for value, k in zip(extra, ks, strict=True)]
    once, per_token = non_negative([ones, tokens], left, weights)
    words = f"One depth: a draft forward is taken to cost its share of layers of the target's step, {share:.2f}."
    return Costs(target, "sequential", once, forward, per_token), words


def non_negative(
    columns: Sequence[Sequence[float]], values: Sequence[float], weights: Sequence[float]
) -> tuple[float, ...]:
    """Weighted least squares with coefficients that are not negative, for a handful of columns: the best of the
    solutions with some of them held at zero."""
    scale = np.asarray(weights)
    matrix, wanted = np.transpose(columns) * scale[:, None], np.asarray(values) * scale
    best, best_error = np.zeros(len(columns)), np.inf
    for chosen in itertools.product((False, True), repeat=len(columns)):
        kept, solution = np.array(chosen), np.zeros(len(columns))
        solution[kept] = np.linalg.lstsq(matrix[:, kept], wanted)[0]
        error = float(np.sum((matrix @ solution - wanted) ** 2))
        if solution.min() >= 0 and error < best_error - 1e-15:
            best, best_error = solution, error
    return tuple(best.tolist())


def judge(fitted: Fitted, points: Sequence[Point]) -> list[Judged]:
    """Every measured cell of the arm and of no speculation beside its prediction."""
    found = []
    for p in points:
        if p.dataset != fitted.dataset or (p.arm != fitted.arm and p.kind != "none"):
            continue
        used = p.kind == "none" or p.k in fitted.depths
        found.append(Judged(p, throughput(fitted.costs, fitted.profile, p.concurrency, p.k), used))
    return found
