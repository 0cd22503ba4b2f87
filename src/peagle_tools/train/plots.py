"""Plots of a run over its steps, from log.jsonl and al.jsonl: loss, accuracy by depth, AL by K."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from peagle_tools.shared import plots
from peagle_tools.shared.files import write_whole

POINTS = 200  # of a line at most: more are averaged
HELD_OUT = 1  # the dash of held-out documents
Line = tuple[str, Sequence[float], Sequence[float], int, int]  # name, steps, values, colour, dash


def write_plots(run: Path) -> None:
    """Draw ``plots/loss.svg``, ``accuracy.svg`` and, where AL was measured, ``acceptance_length.svg`` in ``run``."""
    rows, al = (_rows(run / name) for name in ("log.jsonl", "al.jsonl"))
    trained = [row for row in rows if "loss" in row]
    held_out = [{"step": row["step"], **row["held_out"]} for row in rows if "held_out" in row]
    both = [("", trained, 0), ("held out, ", held_out, HELD_OUT)]
    loss = [_line(name + "loss", part, [row["loss"] for row in part], 0, dash) for name, part, dash in both]
    accuracy = [
        _line(f"{name}depth {d}", part, [row["accuracy"][d] for row in part], d, dash)
        for name, part, dash in both
        for d in range(len(part[0]["accuracy"]) if part else 0)
    ]
    replayed = [row for row in al if row["how"] == "replay"]
    by_k = {k: [row for row in replayed if row["K"] == k] for k in sorted({row["K"] for row in replayed})}
    lengths = [_line(f"K={k}", part, [row["al"] for row in part], k, 0) for k, part in by_k.items()]
    (run / "plots").mkdir(exist_ok=True)
    for file, title, y, lines in (
        ("loss", "Loss", "loss", loss),
        ("accuracy", "Accuracy by depth", "share of drafts that are the target's token", accuracy),
        ("acceptance_length", "AL on held-out text, by replay", "acceptance length, bonus included", lengths),
    ):
        if lines:
            write_whole(run / f"plots/{file}.svg", _chart(title, y, lines).svg)


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _line(name: str, rows: Sequence[dict[str, Any]], values: Sequence[float], color: int, dash: int) -> Line:
    """A line through ``values`` at the steps of ``rows``."""
    groups = np.array_split(np.array([[row["step"] for row in rows], values]).T, min(POINTS, len(values)) or 1)
    steps, means = zip(*(group.mean(axis=0) for group in groups), strict=True)
    return name, steps, means, color, dash


def _chart(title: str, y: str, lines: Iterable[Line]) -> plots.Plot:
    def paint(axes: Axes) -> None:
        for name, steps, values, color, dash in lines:
            plots.line(axes, name, steps, values, color, dash, marker="" if len(steps) > 1 else None)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return plots.chart(title, "step", y, paint)
