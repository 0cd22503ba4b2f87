"""The three plots of a data set: rates, rates against rates of one user, and acceptance lengths.

SVG, one for light and dark pages: transparent, and ink that follows the reader's scheme.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from peagle_tools.bench.metrics import Point, Spread, best_points

COLORS = ("#808a96", "#3b82f6", "#ea580c", "#0d9488", "#a855f7", "#ca8a04", "#e11d48", "#65a30d")
MARKERS = "os^DvPX*"
INK = "#010203"  # in place of the colour of text and axes, until ``draw`` writes it as currentColor
SCHEMES = "<style>svg{color:#3d4650}@media(prefers-color-scheme:dark){svg{color:#b4bec9}}</style>"
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: searchable, and in the page's own font
    "svg.hashsalt": "peagle-vllm",  # the same plot is the same file
    "font.family": "sans-serif",
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "grid.color": COLORS[0],
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(plot: Callable[[Axes], None]) -> str:
    """``plot`` over a grid, with a legend below: a whole SVG document without its prolog."""
    with rc_context(STYLE):
        figure, out = Figure(figsize=(6.6, 4.6), layout="constrained"), io.StringIO()
        axes = figure.subplots()
        axes.grid(True)
        plot(axes)
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small", handlelength=3)
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    return text.replace(">", f">{SCHEMES}", 1)


def _curve(axes: Axes, name: str, xs: Sequence[float], ys: Sequence[Spread], color: int) -> None:
    """The medians, with a band over the range of the repeats; ``color`` is counted.

    Each further series is thinner and its markers smaller: where two coincide, the one beneath still shows.
    """
    ink, marker = COLORS[color % len(COLORS)], MARKERS[color % len(MARKERS)]
    size = max(4.0, 10 - 1.5 * color)
    style: Any = {"color": ink, "marker": marker, "markerfacecolor": "none", "markersize": size, "linewidth": size / 3}
    axes.plot(xs, [y.median for y in ys], label=name, **style)
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
    axes.set(xlabel="concurrency", ylabel="output tokens/s", xscale="log", yscale="log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


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
