"""Plots as SVG, one for light and dark pages: transparent, mid-tone lines, and ink that follows the reader's scheme."""

import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from peagle_tools.bench.metrics import Point, Spread, best_rows

COLORS = ("#808a96", "#3b82f6", "#ea580c", "#0d9488", "#a855f7", "#ca8a04", "#e11d48", "#65a30d")
DASHES = ("-", "--", ":", "-.", (0, (1, 3)))
MARKERS = "os^DvPX*"
RED_GREEN = LinearSegmentedColormap.from_list("", ["#dc2626a0", "#80808000", "#16a34aa0"])  # nothing in the middle
INK = "#010203"  # stands for the colour of text and axes, until ``draw`` writes it as currentColor
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


@dataclass(frozen=True)
class Plot:
    """One plot: a title for people, and a whole SVG document without its prolog."""

    title: str
    svg: str


def draw(title: str, paint: Callable[[Axes], None], size: tuple[float, float]) -> Plot:
    """Let ``paint`` fill the axes of a new figure, ``size`` in inches."""
    with rc_context(STYLE):
        figure, out = Figure(figsize=size, layout="constrained"), io.StringIO()
        paint(figure.subplots())
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    return Plot(title, text.replace(">", f">{SCHEMES}", 1))


def chart(title: str, x: str, y: str, paint: Callable[[Axes], None]) -> Plot:
    """Lines over a grid, with a legend below; ``paint`` calls ``line`` and sets the scales."""

    def whole(axes: Axes) -> None:
        axes.set(xlabel=x, ylabel=y)
        axes.grid(True)
        paint(axes)
        axes.figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small", handlelength=3)

    return draw(title, whole, (6.6, 4.6))


def line(
    axes: Axes,
    name: str,
    xs: Sequence[Spread | float],
    ys: Sequence[Spread | float],
    color: int,
    dash: int = 0,
    marker: str | None = None,
) -> None:
    """A series with a band over the range of its spreads; ``color`` and ``dash`` are counted.

    Each further series is thinner and its markers smaller: where two coincide, the one beneath still shows.
    """

    def values(of: Sequence[Spread | float], name: str) -> list[float]:
        return [getattr(value, name) if isinstance(value, Spread) else value for value in of]

    ink, marker = COLORS[color % len(COLORS)], MARKERS[color % len(MARKERS)] if marker is None else marker
    style: Any = {"color": ink, "linestyle": DASHES[dash % len(DASHES)], "marker": marker, "markerfacecolor": "none"}
    size = max(4.0, 10 - 1.5 * color)
    axes.plot(values(xs, "median"), values(ys, "median"), markersize=size, linewidth=size / 3, label=name, **style)
    band = ([*values(of, "low"), *reversed(values(of, "high"))] for of in (xs, ys))
    axes.fill(*band, color=ink, alpha=0.15)


def heat_map(
    title: str, rows: Sequence[str], columns: Sequence[str], squares: Sequence[Sequence[tuple[float, str]]]
) -> Plot:
    """Ratios, each with the text that stands in its square: green above 1, red below; NaN without colour."""
    logs = [[math.log(ratio) if ratio > 0 else math.nan for ratio, _ in row] for row in squares]
    most = max([math.log(1.2), *(abs(x) for row in logs for x in row if not math.isnan(x))])

    def paint(axes: Axes) -> None:
        axes.pcolormesh(logs, cmap=RED_GREEN, vmin=-most, vmax=most)
        for i, row in enumerate(squares):
            for j, (_, text) in enumerate(row):
                axes.text(j + 0.5, i + 0.5, text, ha="center", va="center", fontsize="small")
        axes.set_xticks([j + 0.5 for j in range(len(columns))], columns)
        axes.set_yticks([i + 0.5 for i in range(len(rows))], rows)
        axes.invert_yaxis()
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)

    return draw(title, paint, (max(3.5, 1.2 + 0.9 * len(columns)), 0.7 + 0.55 * len(rows)))


def log_x(axes: Axes, ticks: Iterable[float]) -> None:
    """A logarithmic axis with a tick at each of ``ticks``."""
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(sorted(set(ticks)), [f"{tick:g}" for tick in sorted(set(ticks))])


def _series(points: Sequence[Point]) -> Iterator[tuple[str, list[Point], int]]:
    """Name, points and colour of each arm, at its best K for each concurrency."""
    rows = best_rows(points)
    for color, arm in enumerate(dict.fromkeys(p.arm for p in points)):
        mine = [row.best[arm] for row in rows if arm in row.best]
        depths = [str(p.k) for p in mine]
        name = f"{arm}, K={depths[0] if len(set(depths)) == 1 else ', '.join(depths)}" if mine[0].k else arm
        yield name, mine, color


def throughput(dataset: str, points: Sequence[Point]) -> Plot:
    def paint(axes: Axes) -> None:
        for name, mine, color in _series(points):
            line(axes, name, [p.concurrency for p in mine], [p.tokens_per_second for p in mine], color)
        log_x(axes, [p.concurrency for p in points])
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))

    return chart(f"Throughput at the best K against concurrency, {dataset}", "concurrency", "output tokens/s", paint)


def pareto(dataset: str, points: Sequence[Point]) -> Plot:
    def paint(axes: Axes) -> None:
        for name, mine, color in _series(points):
            users = [p.spread("tokens_per_second_per_user") for p in mine]
            line(axes, name, users, [p.tokens_per_second for p in mine], color)
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
                line(axes, arm, [p.k for p in mine], [p.spread("acceptance_length") for p in mine], color)
        axes.set_xticks(sorted({p.k for p in points if p.k}))
        axes.set_ylim(bottom=1)

    return chart(f"AL against K, {dataset}", "K", "acceptance length, bonus included", paint)


def acceptance_by_position(dataset: str, points: Sequence[Point]) -> Plot:
    """Share of drafts accepted at each position, at the smallest concurrency and each arm's best K there."""
    first = min(p.concurrency for p in points)

    def paint(axes: Axes) -> None:
        for name, (point, *_), color in _series([p for p in points if p.concurrency == first]):
            if point.k:
                shares = [point.spread("acceptance", i) for i in range(point.k)]
                line(axes, name, range(1, point.k + 1), shares, color)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(0, 1)

    title = f"Acceptance by position, {dataset}, c={first}"
    return chart(title, "position of the draft token", "share of drafts accepted", paint)


def speedups(dataset: str, points: Sequence[Point]) -> list[Plot]:
    """One heat map an arm: speedup over no speculation, K x c, with its range; a doubtful one has no colour."""
    base = {p.concurrency: p.tokens_per_second for p in points if p.kind == "none"}
    found = []
    for arm in dict.fromkeys(p.arm for p in points if p.k):
        mine = {(p.k, p.concurrency): p.tokens_per_second for p in points if p.arm == arm}
        depths, columns = sorted({k for k, _ in mine}), sorted({c for _, c in mine})

        def square(k: int, c: int, mine: dict = mine) -> tuple[float, str]:
            if (k, c) not in mine or c not in base:
                return math.nan, ""
            ratio = mine[k, c].over(base[c])
            doubt = "?" if ratio.in_doubt else ""
            return math.nan if doubt else ratio.median, f"{ratio.median:.2f}{doubt}\n{ratio.low:.2f}..{ratio.high:.2f}"

        squares = [[square(k, c) for c in columns] for k in depths]
        title = f"{arm}: speedup over no speculation, {dataset}"
        found.append(heat_map(title, [f"K={k}" for k in depths], [f"c={c}" for c in columns], squares))
    return found


def sweep_plots(dataset: str, points: Sequence[Point]) -> list[Plot]:
    """Every plot of one data set."""
    found = [throughput(dataset, points), pareto(dataset, points)]
    if any(p.k for p in points):
        found += [acceptance_length(dataset, points), acceptance_by_position(dataset, points)]
    return found + speedups(dataset, points)
