"""Write report.md, report.html and plots/*.svg of a results folder.

``parts`` lays the report out once: text in Markdown, and plots. report.md names the plots as files, report.html holds
them; it is one file, fetches nothing and runs no script.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from peagle_tools.bench import BenchError
from peagle_tools.bench.cells import CellResult, read_results, read_sweep, write_whole
from peagle_tools.bench.metrics import Point, best_rows, by_dataset, number, points, same_texts
from peagle_tools.bench.plots import Plot, sweep_plots
from peagle_tools.bench.published import Published, matching
from peagle_tools.bench.suite import slug
from peagle_tools.bench.verdict import doubts, verdict, warnings
from peagle_tools.shared.provenance import device

STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1b1f24; --line: #d9dde3; --band: #f5f6f8 }
@media (prefers-color-scheme: dark) { :root { --bg: #14171b; --fg: #e6e8eb; --line: #343a42; --band: #1c2026 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem 1rem 4rem; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, sans-serif }
p, ul { max-width: 62rem } h2 { margin-top: 2.4rem }
table { display: block; max-width: 100%; overflow-x: auto; border-collapse: collapse; font-size: .88rem;
  font-variant-numeric: tabular-nums }
th, td { padding: .28rem .5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
th { background: var(--band); white-space: normal; vertical-align: bottom; max-width: 9rem }
.doubt { color: #b7791f; font-style: italic }
th:first-child, td:first-child { text-align: left; white-space: normal }
figure { display: inline-block; vertical-align: top; width: 36rem; max-width: 100%; margin: 0 .4rem 1.2rem 0 }
figcaption { font-weight: 600 } svg { width: 100%; height: auto; font-family: system-ui, sans-serif }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--band); padding: .7rem; font-size: .8rem }
"""
READING = (
    "AL is the acceptance length, bonus token included: 1 + accepted draft tokens / drafts, from the server's "
    "counters. c is the number of requests in flight. A ratio is in doubt (?, and without colour in a map) when its "
    "range over repeats holds 1, or when there is one repeat only. docs/benchmarking.md states every formula."
)


# ------------------------------------------------------------------------------ tables


@dataclass(frozen=True)
class Table:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def markdown_table(t: Table, level: int = 2) -> str:
    """A table under a heading of this level."""
    lines = [t.header, ("---",) * len(t.header), *t.rows]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{'#' * level} {t.title}\n\n{text}" + (f"\n\n{t.note}" if t.note else "")


def percentiles(point: Point, name: str) -> str:
    medians = [point.spread(name, i).median for i in range(3)]
    shown = (number(value, ".0f" if max(medians) >= 100 else ".1f") for value in medians)
    return " / ".join(filter(None, shown))


def cell_tables(dataset: str, points: Sequence[Point]) -> list[Table]:
    """Every metric of every point: what users feel, then drafts and memory."""
    base = {p.concurrency: p for p in points if p.kind == "none"}
    rows = []
    for p in points:
        rows.append(
            {
                "arm": p.arm,
                "K": str(p.k or ""),
                "c": str(p.concurrency),
                "tokens/s": p.tokens_per_second.text(),
                "tokens/s per user": f"{p.spread('tokens_per_second_per_user').median:.1f}",
                "AL": p.spread("acceptance_length").text(".2f"),
                "TTFT ms, p50 / p90 / p99": percentiles(p, "ttft"),
                "TPOT ms": percentiles(p, "tpot"),
                "accepted at position 1..K, %": " ".join(f"{100 * share:.0f}" for share in p.acceptance),
                "ITL ms, p50 / p90 / p99": percentiles(p, "itl"),
                "KV use %": number(100 * p.spread("kv_use").median, ".1f"),
                "GPU memory MiB": number(p.spread("gpu_memory_mib").median),
                "same text %": number(100 * same_texts(p, base[p.concurrency])) if p.concurrency in base else "",
                "repeats": f"{len(p.cells)} of {p.repeats}" if p.failed else f"{p.repeats}",
            }
        )
    names = list(rows[0])
    cut = names.index("accepted at position 1..K, %")
    note = (
        "Medians over repeats, in brackets the smallest and largest. Same text: answers equal to those without "
        "speculation; only float32 at temperature 0 promises 100."
    )
    parts = {"All cells": (names[:cut], ""), "Drafts and memory": (names[:3] + names[cut:], note)}
    return [
        Table(f"{title}, {dataset}", chosen, [[row[name] for name in chosen] for row in rows], text)
        for title, (chosen, text) in parts.items()
    ]


def best_tables(dataset: str, points: Sequence[Point]) -> list[Table]:
    """The published form: output tokens/s of each arm at its best K, and the ratios between them."""
    rows = best_rows(points)
    arms, pairs = dict.fromkeys(p.arm for p in points), dict.fromkeys(pair for row in rows for pair in row.ratios)
    rates, columns = [], [f"c={row.concurrency}" for row in rows]
    for arm in arms:
        best = [row.best.get(arm) for row in rows]
        cells = [f"{number(p.tokens_per_second.median)}{f' (K={p.k})' if p.k else ''}" if p else "failed" for p in best]
        rates.append([arm, *cells])
    ratios = [
        [" / ".join(pair), *(row.ratios[pair].text() if pair in row.ratios else "" for row in rows)] for pair in pairs
    ]
    note = "Output tokens/s at the best K of each arm; ? marks a ratio in doubt."
    tables = [Table(f"Best K, {dataset}", ["tokens/s", *columns], rates, "" if ratios else note)]
    return tables + [Table(f"Ratios at the best K, {dataset}", ["", *columns], ratios, note)] * bool(ratios)


def beside_table(figures: Published, points: Sequence[Point]) -> Table:
    note = f"Published: {figures.source}; {figures.hardware}."
    header = ("", "published", "measured here")
    return Table(f"Beside the published figures: {figures.name}", header, figures.beside(points), note)


# ------------------------------------------------------------------------------ pages


@dataclass(frozen=True)
class Report:
    title: str
    setting: str
    results: list[CellResult]
    groups: dict[str, list[Point]]
    best: list[Table]
    tables: list[Table]  # of every published figure and every cell
    verdict: list[str]
    warnings: list[str]
    doubts: list[str]
    failures: list[str]


def gather(folder: Path) -> Report:
    """Read a results folder; raises BenchError when it holds no whole cell."""
    results = read_results(folder)
    failures = [f"{r.cell.label}: {r.reason}" for r in results if not r.ok]
    groups = by_dataset(points(results))
    if not groups:
        raise BenchError(f"{folder}: all {len(results)} cells failed; the first: {failures[0]}")
    suite: dict[str, Any] = read_sweep(folder).get("suite", {})
    target = suite.get("target", "")
    return Report(
        title=f"Sweep {suite.get('name', folder.name)}",
        setting=setting(results, suite),
        results=results,
        groups=groups,
        best=[table for name, group in groups.items() for table in best_tables(name, group)],
        tables=[beside_table(p, group) for name, group in groups.items() for p in matching(target, name)]
        + [table for name, group in groups.items() for table in cell_tables(name, group)],
        verdict=[line for name, group in groups.items() for line in verdict(name, group)],
        warnings=[line for name, group in groups.items() for line in warnings(name, group)],
        doubts=[line for name, group in groups.items() for line in doubts(name, group)],
        failures=failures,
    )


def setting(results: list[CellResult], suite: dict[str, Any]) -> str:
    """Where and with what this was measured, in one paragraph."""
    one = next(r for r in results if r.ok)
    versions = ", ".join(f"{name} {version}" for name, version in one.versions.items())
    datasets = "; ".join(
        f"{name}: at least {d['prompts']} {'chat' if d['chat'] else 'raw'} prompts a cell, "
        f"{'exactly' if d['ignore_eos'] else 'at most'} {d['output_tokens']} output tokens each"
        for name, d in suite.get("datasets", {}).items()
    )
    repeats = max(r.cell.repeat for r in results)
    devices = " and ".join(sorted({device(r.hardware) for r in results}))
    target = suite.get("target", "").rsplit("/", 1)[-1]
    return (
        f"Target {target} on {devices}, {one.hardware.get('system', '')}; {versions}. "
        f"{datasets}. Temperature {suite.get('temperature', 0):g}, {suite.get('warmups', 0)} warm-up requests a cell, "
        f"{repeats} repeat{'s' if repeats > 1 else ''}, arms interleaved. Measured {one.began[:10]}."
    )


def parts(report: Report) -> Iterator[str | Plot]:
    """The report from top to bottom."""
    yield from (f"# {report.title}", "Fastest:\n\n" + _bullets(report.verdict))
    if report.warnings:
        yield "## Warnings\n\n" + _bullets(report.warnings)
    yield from ("## What was measured", report.setting, READING, *map(markdown_table, report.best))
    if report.failures:
        yield "## Failed cells\n\n" + _bullets(report.failures)
    if report.doubts:
        yield "## Ratios in doubt\n\n" + _bullets(report.doubts)
    for name, group in report.groups.items():
        yield f"## Plots, {name}"
        yield from sweep_plots(name, group)
    yield from map(markdown_table, report.tables)


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def html_page(title: str, content: Iterable[str | Plot], more: str = "") -> str:
    """A self-contained page of Markdown and plots; ``more`` is HTML and comes last."""
    render = MarkdownIt("commonmark", {"html": False}).enable("table").render

    def to_html(part: str) -> str:
        return re.sub(r"<td>(?=[\d.]+\?<)", '<td class="doubt">', render(part))

    body = "\n".join(
        to_html(part)
        if isinstance(part, str)
        else f"<figure><figcaption>{escape(part.title)}</figcaption>{part.svg}</figure>"
        for part in content
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body>\n{body}\n{more}\n</body></html>\n"
    )


def _configurations(results: list[CellResult]) -> str:
    """The whole configuration of the first cell of each arm and depth, folded."""
    found = {"": "<h2>Configuration</h2>"}
    for r in results:
        whole = {"configuration": r.configuration, "versions": r.versions, "hardware": r.hardware}
        name, text = escape(r.cell.drafter), escape(json.dumps(whole, indent=1))
        found.setdefault(name, f"<details><summary>{name}</summary><pre>{text}</pre></details>")
    return "\n".join(found.values())


def write_report(folder: Path, out: Path) -> str:
    """Write report.md, report.html and plots/*.svg into ``out``, each whole. Returns a summary in Markdown.

    Raises:
        BenchError: there is nothing to report, or ``out`` cannot be written.
    """
    report = gather(folder)
    content = list(parts(report))
    names = {part: f"plots/{slug(part.title)}.svg" for part in content if isinstance(part, Plot)}
    text = "\n\n".join(p if isinstance(p, str) else f"![{p.title}]({names[p]})" for p in content) + "\n"
    page = html_page(report.title, content, _configurations(report.results))
    write_files(out, {name: plot.svg for plot, name in names.items()} | {"report.md": text, "report.html": page})
    summary = ["Fastest:\n\n" + _bullets(report.verdict), *map(markdown_table, report.best)]
    if report.warnings:
        summary.insert(1, "Warnings:\n\n" + _bullets(report.warnings))
    if report.failures:
        summary.append(f"{len(report.failures)} cells failed; the report names them.")
    if report.doubts:
        summary.append("Ratios in doubt:\n\n" + _bullets(report.doubts))
    return "\n\n".join(summary)


def write_files(folder: Path, files: dict[str, str]) -> None:
    """Write each file whole or not at all, by its path in ``folder``; raises BenchError when that cannot be."""
    try:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, text)
    except OSError as error:
        raise BenchError(f"{folder}: cannot be written ({error.strerror})") from None
