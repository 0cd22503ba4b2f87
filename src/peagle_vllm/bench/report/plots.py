"""The plots of a report."""

from collections.abc import Callable, Sequence

from peagle_vllm.bench.metrics import Point
from peagle_vllm.bench.report.page import PALETTE
from peagle_vllm.bench.report.svg import (
    Mark,
    Series,
    Square,
    chart,
    decades_axis,
    heat_map,
    linear_axis,
    log_axis,
    number,
)


def _depth_name(point: Point) -> str:
    return f"{point.arm}, K={point.k}" if point.k else point.arm


def _series(points: Sequence[Point], mark: Callable[[Point], Mark]) -> list[Series]:
    """One series an arm and depth: the arm gives the colour, the depth the dashes."""
    arms = list(dict.fromkeys(p.arm for p in points))
    depths = sorted({p.k for p in points if p.k})
    found = []
    for arm in arms:
        for k in sorted({p.k for p in points if p.arm == arm}):
            mine = [p for p in points if p.arm == arm and p.k == k]
            marks = tuple(mark(p) for p in mine)
            dash = depths.index(k) if k else 0
            found.append(Series(_depth_name(mine[0]), marks, arms.index(arm) % len(PALETTE), dash))
    return found


def throughput(dataset: str, points: Sequence[Point]) -> str:
    def mark(p: Point) -> Mark:
        s = p.tokens_per_second
        label = f"c={p.concurrency}: {s.median:.0f} tokens/s ({s.low:.0f}..{s.high:.0f})"
        return Mark(p.concurrency, s.median, s.low, s.high, label)

    series = _series(points, mark)
    x = log_axis("concurrency", [p.concurrency for p in points])
    y = decades_axis("output tokens/s", [v for s in series for m in s.marks for v in (m.low, m.high)])
    return chart(series, x, y, f"Throughput against concurrency, {dataset}")


def pareto(dataset: str, points: Sequence[Point]) -> str:
    def mark(p: Point) -> Mark:
        user, total = p.spread("tokens_per_second_per_user").median, p.tokens_per_second.median
        label = f"c={p.concurrency}: {total:.0f} tokens/s, {user:.1f} per user"
        return Mark(user, total, total, total, label)

    series = _series(points, mark)
    marks = [m for s in series for m in s.marks]
    x = linear_axis("output tokens/s per user", [m.x for m in marks])
    y = linear_axis("output tokens/s", [m.y for m in marks])
    return chart(series, x, y, f"Tokens/s per user against tokens/s (up and right is better), {dataset}")


def acceptance_length(dataset: str, points: Sequence[Point]) -> str:
    """AL against K, at the smallest concurrency that each arm has."""
    speculative = [p for p in points if p.k]
    arms, series = list(dict.fromkeys(p.arm for p in points)), []
    for arm in dict.fromkeys(p.arm for p in speculative):
        mine = [p for p in speculative if p.arm == arm]
        first = min(p.concurrency for p in mine)
        marks = []
        for p in sorted((p for p in mine if p.concurrency == first), key=lambda p: p.k):
            al = p.spread("acceptance_length")
            marks.append(Mark(p.k, al.median, al.low, al.high, f"K={p.k}: AL {al.median:.2f}"))
        series.append(Series(arm, tuple(marks), arms.index(arm) % len(PALETTE)))
    x = log_axis("K", [p.k for p in speculative])
    y = linear_axis("acceptance length, bonus included", [m.high for s in series for m in s.marks] + [1.0])
    return chart(series, x, y, f"AL against K, {dataset}")


def acceptance_by_position(dataset: str, points: Sequence[Point]) -> str:
    """Share of drafts accepted at each position, at the smallest concurrency."""
    first = min(p.concurrency for p in points)
    speculative = [p for p in points if p.k and p.concurrency == first]
    arms = list(dict.fromkeys(p.arm for p in points))
    depths = sorted({p.k for p in speculative})
    series = []
    for p in speculative:
        marks = tuple(
            Mark(i, share, share, share, f"position {i}: {share:.1%}") for i, share in enumerate(p.acceptance, 1)
        )
        series.append(Series(_depth_name(p), marks, arms.index(p.arm) % len(PALETTE), depths.index(p.k)))
    positions = list(range(1, max(depths) + 1))
    x = linear_axis("position of the draft token", [float(v) for v in positions], zero=False)
    y = linear_axis("share of drafts accepted", [0.0, 1.0])
    return chart(series, x, y, f"Acceptance by position, {dataset}, c={first}")


def speedups(dataset: str, points: Sequence[Point]) -> list[str]:
    """One heat map an arm: speedup over no speculation, K x c."""
    base = {p.concurrency: p.tokens_per_second for p in points if p.kind == "none"}
    found = []
    for arm in dict.fromkeys(p.arm for p in points if p.k):
        mine = {(p.k, p.concurrency): p.tokens_per_second for p in points if p.arm == arm}
        depths, columns = sorted({k for k, _ in mine}), sorted({c for _, c in mine})
        squares: list[list[Square | None]] = []
        for k in depths:
            row: list[Square | None] = []
            for c in columns:
                if (k, c) not in mine or c not in base:
                    row.append(None)
                    continue
                ratio = mine[k, c].over(base[c])
                row.append(Square(ratio.value, f"{number(ratio.low)}..{number(ratio.high)}", ratio.in_doubt))
            squares.append(row)
        title = f"{arm}: speedup over no speculation, {dataset}"
        found.append(heat_map([f"K={k}" for k in depths], [f"c={c}" for c in columns], squares, title, "K \\ c"))
    return found
