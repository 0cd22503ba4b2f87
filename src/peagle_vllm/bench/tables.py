"""The tables of a report, as rows of text: the Markdown and the HTML page show the same ones."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from peagle_vllm.bench.metrics import Point, Ratio, Spread, best_depth, same_texts
from peagle_vllm.bench.published import Published


@dataclass(frozen=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""


def count(value: float) -> str:
    return "" if math.isnan(value) else f"{value:,.0f}"


def with_spread(spread: Spread) -> str:
    """``median (low..high)``; the range is left out where one repeat cannot show it."""
    if spread.repeats < 2:
        return count(spread.median)
    return f"{count(spread.median)} ({count(spread.low)}..{count(spread.high)})"


def ratio_text(ratio: Ratio) -> str:
    """``1.23``, with a question mark where its range holds 1 or is unknown."""
    return f"{ratio.value:.2f}{'?' if ratio.in_doubt else ''}"


def percentiles(point: Point, name: str) -> str:
    values = [point.spread(name, i).median for i in range(3)]
    digits = 0 if max(values) >= 100 else 1
    return " / ".join("" if math.isnan(v) else f"{v:.{digits}f}" for v in values)


def by_dataset(points: Sequence[Point]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for point in points:
        found.setdefault(point.dataset, []).append(point)
    return found


def cell_table(dataset: str, points: Sequence[Point]) -> Table:
    """Every metric of every point."""
    header: tuple[str, ...] = ("arm", "K", "c", "tokens/s", "tokens/s per user", "AL", "accepted at position 1..K, %")
    header += ("TTFT ms, p50 / p90 / p99", "TPOT ms", "ITL ms", "KV use %", "GPU memory MiB", "same text %", "repeats")
    note = (
        "Medians over repeats, in brackets the smallest and largest. Same text: answers equal to those without "
        "speculation; only float32 at temperature 0 promises 100."
    )
    eager = [p.spread("eager_draft_steps").median for p in points]
    shows_eager = any(share > 0 for share in eager)
    header += ("eager draft steps %",) if shows_eager else ()
    rows: list[tuple[str, ...]] = []
    base = {p.concurrency: p for p in points if p.kind == "none"}
    for p, eager_share in zip(points, eager, strict=True):
        same = same_texts(p, base[p.concurrency]) if p.concurrency in base else math.nan
        al = p.spread("acceptance_length")
        rows.append(
            (
                p.arm,
                str(p.k or ""),
                str(p.concurrency),
                with_spread(p.tokens_per_second),
                f"{p.spread('tokens_per_second_per_user').median:.1f}",
                f"{al.median:.2f}" if al.high - al.low < 0.005 else f"{al.median:.2f} ({al.low:.2f}..{al.high:.2f})",
                " ".join(f"{100 * share:.0f}" for share in p.acceptance),
                percentiles(p, "ttft"),
                percentiles(p, "tpot"),
                percentiles(p, "itl"),
                f"{100 * p.spread('kv_use').median:.1f}" if p.spread("kv_use").repeats else "",
                count(p.spread("gpu_memory_mib").median),
                "" if math.isnan(same) else f"{100 * same:.0f}",
                f"{len(p.cells)}" if len(p.cells) == p.asked else f"{len(p.cells)} of {p.asked}",
                *((f"{100 * eager_share:.1f}" if eager_share > 0 else "",) if shows_eager else ()),
            )
        )
    return Table(f"All cells, {dataset}", header, rows, note)


@dataclass(frozen=True)
class BestRow:
    """One concurrency of the best-K table."""

    concurrency: int
    best: dict[str, Point]  # by arm
    ratios: dict[str, Ratio]  # "A / B" -> ratio


def best_rows(points: Sequence[Point]) -> list[BestRow]:
    """For each concurrency: each arm at its best depth, and the ratios of the published tables."""
    rows = []
    for concurrency in sorted({p.concurrency for p in points}):
        here = [p for p in points if p.concurrency == concurrency]
        arms = {p.arm: p.kind for p in here}
        best = {arm: point for arm in arms if (point := best_depth(p for p in here if p.arm == arm))}

        def ratio(a: str, b: str, best: dict[str, Point] = best) -> Ratio:
            return best[a].tokens_per_second.over(best[b].tokens_per_second)

        parallel = [arm for arm, kind in arms.items() if kind == "P-EAGLE"]
        ratios = {f"{a} / {b}": ratio(a, b) for a in parallel for b, kind in arms.items() if kind == "EAGLE-3"}
        if len(parallel) > 1:
            ratios |= {f"{parallel[0]} / {other}": ratio(parallel[0], other) for other in parallel[1:]}
        ratios |= {
            f"{a} / {b}": ratio(a, b)
            for b, base in arms.items()
            if base == "none"
            for a, kind in arms.items()
            if kind != "none"
        }
        rows.append(BestRow(concurrency, best, ratios))
    return rows


def best_table(dataset: str, points: Sequence[Point]) -> Table:
    """The published form: output tokens/s of each arm at its best K, and the ratios between them."""
    rows = best_rows(points)
    arms = list(dict.fromkeys(p.arm for p in points))
    ratios = list(dict.fromkeys(name for row in rows for name in row.ratios))
    lines = []
    for row in rows:
        cells = []
        for arm in arms:
            point = row.best.get(arm)
            depth = f" (K={point.k})" if point and point.k else ""
            cells.append(f"{count(point.tokens_per_second.median)}{depth}" if point else "failed")
        cells += [ratio_text(row.ratios[name]) if name in row.ratios else "" for name in ratios]
        lines.append((str(row.concurrency), *cells))
    note = "Output tokens/s at the best K of each arm; ? marks a ratio in doubt (below)."
    return Table(f"Best K, {dataset}", ("c", *arms, *ratios), lines, note)


def warnings(points_of: dict[str, list[Point]]) -> list[str]:
    """One line for every ratio of the best-K tables that its spread does not carry."""
    found = []
    for dataset, points in points_of.items():
        ratios = [(row.concurrency, name, ratio) for row in best_rows(points) for name, ratio in row.ratios.items()]
        if ratios and all(ratio.repeats < 2 for _, _, ratio in ratios):
            found.append(f"{dataset}: every ratio, for there is one repeat and its noise is unknown.")
            continue
        for concurrency, name, ratio in ratios:
            where = f"{dataset}, c={concurrency}, {name} = {ratio.value:.2f}"
            if ratio.repeats < 2:
                found.append(f"{where}: one repeat, so its noise is unknown.")
            elif ratio.overlaps_one:
                found.append(f"{where}: its range over repeats is {ratio.low:.2f}..{ratio.high:.2f} and holds 1.")
    return found


def published_table(figures: Published, points: Sequence[Point]) -> Table:
    """Published ratios and acceptance lengths, each beside the measured one of the same K and concurrency."""
    rows: list[tuple[str, ...]] = []
    measured = {row.concurrency: row for row in best_rows(points)}
    for concurrency, value in figures.ratios.items():
        row = measured.get(concurrency)
        found = [r for name, r in row.ratios.items() if _is_pe_ratio(name, row)] if row else []
        rows.append(
            (f"P-EAGLE / EAGLE-3, c={concurrency}", f"{value:.2f}", ratio_text(found[0]) if found else "not measured")
        )
    for kind, table in figures.acceptance_length.items():
        for k, value in table.items():
            als = [p.spread("acceptance_length").median for p in points if p.kind == kind and p.k == k]
            rows.append((f"AL, {kind} K={k}", f"{value:.2f}", f"{als[0]:.2f}" if als else "not measured"))
    for kind, by_k in figures.tokens_per_second.items():
        for k, by_c in by_k.items():
            for concurrency, value in by_c.items():
                here = [p for p in points if p.kind == kind and p.k == k and p.concurrency == concurrency]
                text = with_spread(here[0].tokens_per_second) if here else "not measured"
                rows.append((f"tokens/s, {kind}{f' K={k}' if k else ''}, c={concurrency}", count(value), text))
    note = f"Published: {figures.source}; {figures.hardware}."
    return Table(f"Beside the published figures: {figures.name}", ("", "published", "measured here"), rows, note)


def _is_pe_ratio(name: str, row: BestRow) -> bool:
    above, _, below = name.partition(" / ")
    return (
        above in row.best
        and below in row.best
        and row.best[above].kind == "P-EAGLE"
        and row.best[below].kind == "EAGLE-3"
    )
