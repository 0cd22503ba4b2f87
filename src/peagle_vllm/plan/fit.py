"""Costs and acceptance of one arm, from measured cells."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from peagle_vllm.bench.errors import BenchError
from peagle_vllm.bench.metrics import Point
from peagle_vllm.plan.acceptance import Profile, from_shares
from peagle_vllm.plan.model import Costs, Target, throughput


@dataclass(frozen=True)
class Fitted:
    """One arm on one data set.

    Attributes:
        depths: the K whose cells were used; the others were kept for judging.
    """

    arm: str
    dataset: str
    costs: Costs
    profile: Profile
    depths: tuple[int, ...]


@dataclass(frozen=True)
class Judged:
    """A measured cell beside the model's word for it."""

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
    drafting = "parallel" if mine[0].kind == "P-EAGLE" else "sequential"
    rows, values, weights = [], [], []
    for p in mine:
        total = round_ms(p)
        factors = (
            (1.0, float(p.k * p.concurrency)) if drafting == "parallel" else (float(p.k), float(p.k * p.concurrency))
        )
        rows.append(factors)
        values.append(total - target(p.concurrency))
        weights.append(1 / total)  # so that relative errors count, at every concurrency alike
    fixed, per_token = _non_negative_line(rows, values, weights)
    by_k = {}
    for k in sorted({p.k for p in mine}):
        lowest = min((p for p in mine if p.k == k), key=lambda p: p.concurrency)
        by_k[k] = lowest.acceptance
    costs = Costs(target, "parallel" if drafting == "parallel" else "sequential", fixed, per_token)
    return Fitted(arm, dataset, costs, from_shares(by_k), tuple(by_k))


def _non_negative_line(
    rows: Sequence[tuple[float, float]], values: Sequence[float], weights: Sequence[float]
) -> tuple[float, float]:
    """Weighted least squares for two coefficients that are not negative: the best of the inner solution and the two
    edges. One cell alone sets the first coefficient."""

    def error(a: float, b: float) -> float:
        return math.fsum((w * (a * x + b * y - v)) ** 2 for (x, y), v, w in zip(rows, values, weights, strict=True))

    def total(f: int, g: int) -> float:
        return math.fsum(row[f] * row[g] * w * w for row, w in zip(rows, weights, strict=True))

    moments = [math.fsum(row[f] * v * w * w for row, v, w in zip(rows, values, weights, strict=True)) for f in (0, 1)]
    xx, xy, yy = total(0, 0), total(0, 1), total(1, 1)
    candidates = [(0.0, 0.0), (max(0.0, moments[0] / xx), 0.0), (0.0, max(0.0, moments[1] / yy))]
    determinant = xx * yy - xy * xy
    if determinant > 1e-9 * xx * yy:
        a = (moments[0] * yy - moments[1] * xy) / determinant
        b = (moments[1] * xx - moments[0] * xy) / determinant
        if a >= 0 and b >= 0:
            candidates.append((a, b))
    return min(candidates, key=lambda c: error(*c))


def judge(fitted: Fitted, points: Sequence[Point]) -> list[Judged]:
    """Every measured cell of the arm and of no speculation beside its prediction."""
    found = []
    for p in points:
        if p.dataset != fitted.dataset or (p.arm != fitted.arm and p.kind != "none"):
            continue
        used = p.kind == "none" or p.k in fitted.depths
        found.append(Judged(p, throughput(fitted.costs, fitted.profile, p.concurrency, p.k), used))
    return found
