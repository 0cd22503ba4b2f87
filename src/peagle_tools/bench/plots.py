"""The three plots of a data set: rates, rates against rates of one user, and acceptance lengths."""

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from peagle_tools.bench.metrics import Point, Spread, best_points
from peagle_tools.shared.plots import COLORS, Plot, chart, line, log_x


def _curve(axes: Axes, name: str, xs: Sequence[float], ys: Sequence[Spread], color: int) -> None:
    """The medians, with a band over the range of the repeats."""
    line(axes, name, xs, [y.median for y in ys], color)
    axes.fill_between(xs, [y.low for y in ys], [y.high for y in ys], color=COLORS[color % len(COLORS)], alpha=0.15)


def _series(points: Sequence[Point]) -> Iterator[tuple[str, list[Point], int]]:
    """Name, points and colour of each arm, at its best K for each concurrency."""
    best = best_points(points)
    for color, arm in enumerate(dict.fromkeys(arm for arm, _ in best)):
        mine = sorted((p for p in best.values() if p.arm == arm), key=lambda p: p.concurrency)
        depths = ", ".join(dict.fromkeys(str(p.k) for p in mine))
        yield f"{arm}, K={depths}" if mine[0].k else arm, mine, color


def throughput(dataset: str, points: Sequence[Point]) -> Plot:
    def paint(axes: Axes) -> None:
        for name, mine, color in _series(points):
            _curve(axes, name, [p.concurrency for p in mine], [p.tokens_per_second for p in mine], color)
        log_x(axes, [p.concurrency for p in points])
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))

    return chart(f"Throughput at the best K against concurrency, {dataset}", "concurrency", "output tokens/s", paint)


def pareto(dataset: str, points: Sequence[Point]) -> Plot:
    def paint(axes: Axes) -> None:
        for name, mine, color in _series(points):
            users = [p.tokens_per_second.median / p.concurrency for p in mine]
            _curve(axes, name, users, [p.tokens_per_second for p in mine], color)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)

    title = f"Tokens/s per user against tokens/s at the best K (up and right is better), {dataset}"
    return chart(title, "output tokens/s per user", "output tokens/s", paint)


def acceptance_length(dataset: str, points: Sequence[Point]) -> Plot:
    """AL against K, at the smallest concurrency that each arm has."""

    def paint(axes: Axes) -> None:
        for color, arm in enumerate(dict.fromkeys(p.arm for p in points)):
            mine = sorted((p for p in points if p.arm == arm and p.k), key=lambda p: (p.concurrency, p.k))
            mine = [p for p in mine if p.concurrency == mine[0].concurrency]
            if mine:
                _curve(axes, arm, [p.k for p in mine], [p.spread("acceptance_length") for p in mine], color)
        axes.set_xticks(sorted({p.k for p in points if p.k}))
        axes.set_ylim(bottom=1)

    return chart(f"AL against K, {dataset}", "K", "acceptance length, bonus included", paint)
