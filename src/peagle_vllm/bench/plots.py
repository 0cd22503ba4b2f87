"""Plots as SVG, one for light and dark pages: transparent, mid-tone lines, and ink that follows the reader's scheme."""

import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from peagle_vllm.bench.metrics import Point

COLORS = ("#808a96", "#3b82f6", "#ea580c", "#0d9488", "#a855f7", "#ca8a04", "#e11d48", "#65a30d")
DASHES = ("-", "--", ":", "-.", (0, (1, 3)))
RED_GREEN = LinearSegmentedColormap.from_list("", ["#dc2626a0", "#80808000", "#16a34aa0"])  # nothing in the middle
INK = "#010203"  # stands for the colour of text and axes, until ``svg`` writes it as currentColor
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


@dataclass(frozen=True)
class Line:
    """A series: (x, y, smallest y, largest y) of each mark; ``color`` and ``dash`` count arms and depths."""

    name: str
    marks: Sequence[tuple[float, float, float, float]]
    color: int
    dash: int = 0
    dots: bool = True


def draw(title: str, paint: Callable[[Axes], None], size: tuple[float, float]) -> Plot:
    """Let ``paint`` fill the axes of a new figure, ``size`` in inches."""
    with rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure.subplots())
        out = io.StringIO()
        figure.savefig(
            out, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    return Plot(title, text.replace(">", f">{SCHEMES}", 1))


def chart(title: str, lines: Iterable[Line], x: str, y: str, scale: Callable[[Axes], None]) -> Plot:
    """Series with their spreads as bars; ``scale`` sets the axes up once everything is drawn."""

    def paint(axes: Axes) -> None:
        for line in lines:
            xs, ys, low, high = zip(*line.marks, strict=True)
            color = COLORS[line.color % len(COLORS)]
            style = DASHES[line.dash % len(DASHES)]
            axes.plot(
                xs, ys, color=color, linestyle=style, marker="o" if line.dots else "", markersize=4, label=line.name
            )
            axes.vlines(xs, low, high, color=color, alpha=0.6)
        axes.set(xlabel=x, ylabel=y)
        axes.grid(True)
        scale(axes)
        axes.figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small", handlelength=3)

    return draw(title, paint, (6.6, 4.6))


def heat_map(
    title: str, rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[tuple[float, str]]]
) -> Plot:
    """Ratios, each with the text that stands in its square: green above 1, red below; NaN leaves a square empty."""
    known = [abs(math.log(value)) for row in values for value, _ in row if value > 0]
    most = max([*known, math.log(1.2)])

    def paint(axes: Axes) -> None:
        logs = [[math.log(value) if value > 0 else math.nan for value, _ in row] for row in values]
        axes.pcolormesh(logs, cmap=RED_GREEN, vmin=-most, vmax=most)
        for i, row in enumerate(values):
            for j, (_, text) in enumerate(row):
                axes.text(j + 0.5, i + 0.5, text, ha="center", va="center", fontsize="small")
        axes.set_xticks([j + 0.5 for j in range(len(columns))], columns)
        axes.set_yticks([i + 0.5 for i in range(len(rows))], rows)
        axes.invert_yaxis()
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)

    return draw(title, paint, (max(3.5, 1.2 + 0.9 * len(columns)), 0.7 + 0.55 * len(rows)))


def log_x(axes: Axes, values: Iterable[float]) -> None:
    """A logarithmic axis with a tick at each of ``values``."""
    axes.set_xscale("log")
    ticks = sorted(set(values))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def _lines(points: Sequence[Point], mark: Callable[[Point], tuple[float, float, float, float]]) -> list[Line]:
    """One line an arm and depth: the arm gives the colour, the depth the dashes."""
    arms, depths = list(dict.fromkeys(p.arm for p in points)), sorted({p.k for p in points if p.k})
    found = []
    for arm, k in dict.fromkeys((p.arm, p.k) for p in points):
        marks = [mark(p) for p in points if (p.arm, p.k) == (arm, k)]
        found.append(Line(f"{arm}, K={k}" if k else arm, marks, arms.index(arm), depths.index(k) if k else 0))
    return found


def throughput(dataset: str, points: Sequence[Point]) -> Plot:
    def scale(axes: Axes) -> None:
        log_x(axes, [p.concurrency for p in points])
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))

    def mark(p: Point) -> tuple[float, float, float, float]:
        s = p.tokens_per_second
        return p.concurrency, s.median, s.low, s.high

    title = f"Throughput against concurrency, {dataset}"
    return chart(title, _lines(points, mark), "concurrency", "output tokens/s", scale)


def pareto(dataset: str, points: Sequence[Point]) -> Plot:
    def mark(p: Point) -> tuple[float, float, float, float]:
        total = p.tokens_per_second.median
        return p.spread("tokens_per_second_per_user").median, total, total, total

    title = f"Tokens/s per user against tokens/s (up and right is better), {dataset}"
    return chart(title, _lines(points, mark), "output tokens/s per user", "output tokens/s", from_zero)


def from_zero(axes: Axes) -> None:
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def acceptance_length(dataset: str, points: Sequence[Point]) -> Plot:
    """AL against K, at the smallest concurrency that each arm has."""
    arms, lines = list(dict.fromkeys(p.arm for p in points)), []
    for arm in dict.fromkeys(p.arm for p in points if p.k):
        first = min(p.concurrency for p in points if p.arm == arm and p.k)
        mine = sorted((p for p in points if p.arm == arm and p.k and p.concurrency == first), key=lambda p: p.k)
        spreads = [(p.k, p.spread("acceptance_length")) for p in mine]
        lines.append(Line(arm, [(k, al.median, al.low, al.high) for k, al in spreads], arms.index(arm)))

    def scale(axes: Axes) -> None:
        axes.set_xticks(sorted({p.k for p in points if p.k}))
        axes.set_ylim(bottom=1)

    return chart(f"AL against K, {dataset}", lines, "K", "acceptance length, bonus included", scale)


def acceptance_by_position(dataset: str, points: Sequence[Point]) -> Plot:
    """Share of drafts accepted at each position, at the smallest concurrency."""
    first = min(p.concurrency for p in points)
    here = [p for p in points if p.k and p.concurrency == first]
    arms, depths = list(dict.fromkeys(p.arm for p in points)), sorted({p.k for p in here})
    lines = [
        Line(
            f"{p.arm}, K={p.k}",
            [(i, share, share, share) for i, share in enumerate(p.acceptance, 1)],
            arms.index(p.arm),
            depths.index(p.k),
        )
        for p in here
    ]

    def scale(axes: Axes) -> None:
        axes.set_xticks(range(1, max(depths) + 1))
        axes.set_ylim(0, 1)

    title = f"Acceptance by position, {dataset}, c={first}"
    return chart(title, lines, "position of the draft token", "share of drafts accepted", scale)


def speedups(dataset: str, points: Sequence[Point]) -> list[Plot]:
    """One heat map an arm: speedup over no speculation, K x c, with its range over repeats."""
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
            return ratio.value, f"{ratio.value:.2f}{doubt}\n{ratio.low:.2f}..{ratio.high:.2f}"

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
