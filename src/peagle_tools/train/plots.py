"""Plots of a run over its steps, from log.jsonl and al.jsonl: loss, accuracy by depth, AL by K."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from peagle_tools.shared import plots
from peagle_tools.shared.files import write_whole
from peagle_tools.train.lines import read_lines

POINTS = 200  # of a line at most: more are averaged


class Line(NamedTuple):
    """A line through (step, value) points; ``dash`` is 1 for held-out documents."""

    name: str
    points: list[tuple[int, float]]
    color: int
    dash: int = 0


def write_plots(run: Path) -> None:
    """Draw ``plots/loss.svg``, ``accuracy.svg`` and, where AL was measured, ``acceptance_length.svg`` in ``run``."""
    rows, al = (list(read_lines(run / name, must_exist=False)) for name in ("log.jsonl", "al.jsonl"))
    trained = [row for row in rows if "loss" in row]
    held_out = [{"step": row["step"], **row["held_out"]} for row in rows if "held_out" in row]
    loss, accuracy = [], []
    for dash, (name, part) in enumerate((("", trained), ("held out, ", held_out))):
        if not part:
            continue
        loss.append(Line(f"{name}loss", [(row["step"], row["loss"]) for row in part], 0, dash))
        for depth in range(len(part[0]["accuracy"])):
            points = [(row["step"], row["accuracy"][depth]) for row in part]
            accuracy.append(Line(f"{name}depth {depth}", points, depth, dash))
    replayed = [row for row in al if row["how"] == "replay"]
    lengths = [
        Line(f"K={k}", [(row["step"], row["al"]) for row in replayed if row["K"] == k], k)
        for k in sorted({row["K"] for row in replayed})
    ]
    (run / "plots").mkdir(exist_ok=True)
    for file, title, y, lines in (
        ("loss", "Loss", "loss", loss),
        ("accuracy", "Accuracy by depth", "share of drafts that are the target's token", accuracy),
        ("acceptance_length", "AL on held-out text, by replay", "acceptance length, bonus included", lengths),
    ):
        if lines:
            write_whole(run / f"plots/{file}.svg", _chart(title, y, lines).svg)


def _chart(title: str, y: str, lines: Iterable[Line]) -> plots.Plot:
    def paint(axes: Axes) -> None:
        for name, points, color, dash in lines:
            groups = np.array_split(np.array(points).reshape(-1, 2), min(POINTS, len(points)))
            steps, values = zip(*(group.mean(axis=0) for group in groups), strict=True)
            plots.line(axes, name, steps, values, color, dash, marker="" if len(steps) > 1 else None)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return plots.chart(title, "step", y, paint)
