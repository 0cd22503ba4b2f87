"""Plots as inline SVG: no script, no network, colours from the page's style so that light and dark mode both work.

``chart`` draws series of points over two axes, ``heat_map`` a grid of numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 380
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 46
DASHES = ("", "7 4", "2 4", "9 3 2 3", "1 6")


@dataclass(frozen=True)
class Mark:
    """One measured point; ``low`` and ``high`` are drawn as a bar where they differ from ``y``."""

    x: float
    y: float
    low: float
    high: float
    label: str = ""


@dataclass(frozen=True)
class Series:
    """``color`` is an index into the page's palette, ``dash`` one into DASHES."""

    name: str
    marks: tuple[Mark, ...]
    color: int
    dash: int = 0


@dataclass(frozen=True)
class Axis:
    """Values at the ends and ticks; on a logarithmic axis positions are those of the logarithm."""

    title: str
    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def share(self, value: float) -> float:
        """Where ``value`` lies between the ends, 0..1."""
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return (value - low) / (high - low) if high > low else 0.5


def linear_axis(title: str, values: Sequence[float], zero: bool = True) -> Axis:
    """Round ticks over ``values``; from 0 unless told otherwise."""
    low, high = (0.0 if zero else min(values)), max(values)
    span = (high - low) or abs(high) or 1.0
    step = 10 ** math.floor(math.log10(span / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 6)
    first, last = math.floor(low / step), math.ceil(high / step)
    ticks = tuple(round(i * step, 12) for i in range(first, last + 1))
    return Axis(title, ticks[0], ticks[-1], ticks)


def log_axis(title: str, values: Sequence[float]) -> Axis:
    """One tick a value, evenly spaced in the logarithm: for concurrencies."""
    ticks = tuple(sorted(set(values)))
    low, high = ticks[0], ticks[-1]
    pad = (high / low) ** 0.03 if high > low else 1.5
    return Axis(title, low / pad, high * pad, ticks, log=True)


def decades_axis(title: str, values: Sequence[float]) -> Axis:
    """Logarithmic, with ticks at 1, 2, 5, 10, 20 ... around ``values``."""
    low, high = min(values), max(values)
    all_ticks = [
        f * 10.0**e for e in range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2) for f in (1, 2, 5)
    ]
    first = max(tick for tick in all_ticks if tick <= low)
    last = min(tick for tick in all_ticks if tick >= high)
    ticks = tuple(tick for tick in all_ticks if first <= tick <= last)
    return Axis(title, first, last, ticks, log=True)


def number(value: float) -> str:
    """Short and exact enough for a tick or a label."""
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:.3g}"


def chart(series: Sequence[Series], x: Axis, y: Axis, title: str) -> str:
    """A line chart with its legend as one ``figure``."""
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def px(value: float) -> float:
        return round(LEFT + inner_width * x.share(value), 1)

    def py(value: float) -> float:
        return round(TOP + inner_height * (1 - y.share(value)), 1)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for tick in y.ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(tick)}" y2="{py(tick)}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{py(tick) + 4}" text-anchor="end">{number(tick)}</text>')
    for tick in x.ticks:
        parts.append(f'<line class="grid" x1="{px(tick)}" x2="{px(tick)}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        where = f'x="{px(tick)}" y="{HEIGHT - BOTTOM + 17}"'
        parts.append(f'<text class="tick" {where} text-anchor="middle">{number(tick)}</text>')
    middle = TOP + inner_height / 2
    parts.append(
        f'<text class="axis" x="{LEFT + inner_width / 2}" y="{HEIGHT - 8}" text-anchor="middle">{x.title}</text>'
    )
    turned = f'transform="rotate(-90 14 {middle})" x="14" y="{middle}"'
    parts.append(f'<text class="axis" {turned} text-anchor="middle">{y.title}</text>')
    for one in series:
        points = " ".join(f"{px(mark.x)},{py(mark.y)}" for mark in one.marks)
        dash = f' stroke-dasharray="{DASHES[one.dash % len(DASHES)]}"' if one.dash % len(DASHES) else ""
        parts.append(f'<g class="s{one.color}"><polyline points="{points}"{dash}/>')
        for mark in one.marks:
            if mark.high > mark.low:
                parts.append(
                    f'<line class="bar" x1="{px(mark.x)}" x2="{px(mark.x)}" y1="{py(mark.low)}" y2="{py(mark.high)}"/>'
                )
            label = escape(f"{one.name}: {mark.label or number(mark.y)}")
            parts.append(f'<circle cx="{px(mark.x)}" cy="{py(mark.y)}" r="3.6"><title>{label}</title></circle>')
        parts.append("</g>")
    parts.append("</svg>")
    return _figure("".join(parts) + _legend(series), title)


def _legend(series: Sequence[Series]) -> str:
    items = []
    for one in series:
        dash = DASHES[one.dash % len(DASHES)]
        drawn = f' stroke-dasharray="{dash}"' if dash else ""
        line = f'<svg class="key s{one.color}" viewBox="0 0 30 10"><polyline points="1,5 29,5"{drawn}/></svg>'
        items.append(f"<li>{line}{escape(one.name)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def _figure(content: str, title: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{content}</figure>"


@dataclass(frozen=True)
class Square:
    """One number of a heat map; ``note`` is shown on hover, ``doubt`` puts a question mark behind it."""

    value: float
    note: str = ""
    doubt: bool = False


def heat_map(
    rows: Sequence[str], columns: Sequence[str], squares: Sequence[Sequence[Square | None]], title: str, corner: str
) -> str:
    """Numbers around 1 as a table: green above, red below, the stronger the farther away."""
    known = [abs(math.log(square.value)) for row in squares for square in row if square and square.value > 0]
    scale = max([*known, math.log(1.2)])
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = []
    for name, row in zip(rows, squares, strict=True):
        cells = []
        for square in row:
            if square is None:
                cells.append("<td></td>")
                continue
            strength = round(55 * min(1.0, abs(math.log(max(square.value, 1e-9))) / scale))
            side = "good" if square.value >= 1 else "bad"
            style = f"background:color-mix(in srgb, var(--{side}) {strength}%, transparent)"
            doubt = "?" if square.doubt else ""
            note = f' title="{escape(square.note)}"' if square.note else ""
            cells.append(f'<td style="{style}"{note}>{square.value:.2f}{doubt}</td>')
        body.append(f"<tr><th>{escape(name)}</th>{''.join(cells)}</tr>")
    table = f"<table><thead><tr><th>{escape(corner)}</th>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return _figure(f'<div class="scroll heat">{table}</div>', title)
