"""The three plots of a data set: rates, rates against rates of one user, and acceptance lengths, as SVG."""

import io
from collections.abc import Callable, Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from peagle_tools.bench.metrics import Point, Spread, best_points

MARKERS = "os^DvPX*"


def draw(plot: Callable[[Axes], None]) -> str:
    """``plot`` over a grid, with a legend below."""
    figure, out = Figure(figsize=(6.6, 4.6), layout="constrained"), io.StringIO()
    axes = figure.subplots()
    axes.grid(alpha=0.25)
    plot(axes)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(out, format="svg")
    return out.getvalue()


def _curve(axes: Axes, name: str, xs: Sequence[float], ys: Sequence[Spread], color: int) -> None:
    """The medians, with a band over the range of the repeats; ``color`` is counted.

    Each further series is thinner and its markers smaller: where two coincide, the one beneath still shows.
    """
    ink, size = f"C{color}", max(4.0, 10 - 1.5 * color)
    marker = MARKERS[color % len(MARKERS)]
    axes.plot(xs, [y.median for y in ys], ink, label=name, marker=marker, markersize=size, linewidth=size / 3)
    axes.fill_between(xs, [y.low for y in ys], [y.high for y in ys], color=ink, alpha=0.15)


def _series(points: Sequence[Point]) -> Iterator[tuple[str, list[Point], int]]:
    """Name, points and colour of each arm, at its best K for each concurrency."""
    best = best_points(points)
    for color, arm in enumerate(dict.fromkeys(arm for arm, _ in best)):
        mine = sorted((p for p in best.values() if p.arm == arm), key=lambda p: p.concurrency)
        depths = ", ".join(dict.fromkeys(str(p.k) for p in mine))
        yield f"{arm}, K={depths}" if mine[0].k else arm, mine, color


def throughput(axes: Axes, points: Sequence[Point]) -> None:
    for name, mine, color in _series(points):
        _curve(axes, name, [p.concurrency for p in mine], [p.tokens_per_second for p in mine], color)
    ticks = sorted({p.concurrency for p in points})
    axes.set(xlabel="concurrency", ylabel="output tokens/s", xscale="log")
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.minorticks_off()
    axes.set_ylim(bottom=0)


def pareto(axes: Axes, points: Sequence[Point]) -> None:
    for name, mine, color in _series(points):
        users = [p.tokens_per_second.median / p.concurrency for p in mine]
        _curve(axes, name, users, [p.tokens_per_second for p in mine], color)
    axes.set(xlabel="output tokens/s per user", ylabel="output tokens/s")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def acceptance_length(axes: Axes, points: Sequence[Point]) -> None:
    """At the smallest concurrency that each arm has."""
    for color, arm in enumerate(dict.fromkeys(p.arm for p in points)):
        mine = sorted((p for p in points if p.arm == arm and p.k), key=lambda p: (p.concurrency, p.k))
        mine = [p for p in mine if p.concurrency == mine[0].concurrency]
        if mine:
            _curve(axes, arm, [p.k for p in mine], [p.spread("acceptance_length") for p in mine], color)
    axes.set(xlabel="K", ylabel="acceptance length, bonus included", xticks=sorted({p.k for p in points if p.k}))
    axes.set_ylim(bottom=1)


PLOTS = {  # with their titles
    throughput: "Throughput at the best K against concurrency",
    pareto: "Tokens/s per user against tokens/s at the best K (up and right is better)",
    acceptance_length: "AL against K",
}
