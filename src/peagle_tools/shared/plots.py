"""Line plots as SVG, one for light and dark pages: transparent, and ink that follows the reader's scheme."""

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

COLORS = ("#808a96", "#3b82f6", "#ea580c", "#0d9488", "#a855f7", "#ca8a04", "#e11d48", "#65a30d")
MARKERS = "os^DvPX*"
INK = "#010203"  # stands for the colour of text and axes, until ``chart`` writes it as currentColor
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


def chart(title: str, x: str, y: str, paint: Callable[[Axes], None]) -> Plot:
    """Lines over a grid, with a legend below; ``paint`` calls ``line`` and sets the scales."""
    with rc_context(STYLE):
        figure, out = Figure(figsize=(6.6, 4.6), layout="constrained"), io.StringIO()
        axes = figure.subplots()
        axes.set(xlabel=x, ylabel=y)
        axes.grid(True)
        paint(axes)
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small", handlelength=3)
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    return Plot(title, text.replace(">", f">{SCHEMES}", 1))


def line(axes: Axes, name: str, xs: Sequence[float], ys: Sequence[float], color: int) -> None:
    """A series; ``color`` is counted.

    Each further series is thinner and its markers smaller: where two coincide, the one beneath still shows.
    """
    ink, marker, size = COLORS[color % len(COLORS)], MARKERS[color % len(MARKERS)], max(4.0, 10 - 1.5 * color)
    style: Any = {"color": ink, "marker": marker, "markerfacecolor": "none"}
    axes.plot(xs, ys, markersize=size, linewidth=size / 3, label=name, **style)


def log_x(axes: Axes, ticks: Iterable[float]) -> None:
    """A logarithmic axis with a tick at each of ``ticks``."""
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(sorted(set(ticks)), [f"{tick:g}" for tick in sorted(set(ticks))])
