"""Write report.md, report.html and plots/*.svg of a results folder.

``parts`` lays the report out once: text in Markdown, and plots. report.md names the plots as files, report.html holds
them; it is one file, fetches nothing and runs no script.
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from peagle_vllm.bench import BenchError
from peagle_vllm.bench.cells import CellResult, read_results, read_sweep
from peagle_vllm.bench.metrics import Point, points
from peagle_vllm.bench.plots import Plot, sweep_plots
from peagle_vllm.bench.published import matching
from peagle_vllm.bench.suite import slug
from peagle_vllm.bench.tables import Table, best_table, by_dataset, cell_table, published_table, warnings
from peagle_vllm.provenance import device

PLOTS = "plots"  # folder beside report.md
STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1b1f24; --line: #d9dde3; --band: #f5f6f8 }
@media (prefers-color-scheme: dark) { :root { --bg: #14171b; --fg: #e6e8eb; --line: #343a42; --band: #1c2026 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem 1rem 4rem; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, sans-serif }
p, ul { max-width: 62rem } h2 { margin-top: 2.4rem }
table { display: block; max-width: 100%; overflow-x: auto; border-collapse: collapse; font-size: .88rem;
  font-variant-numeric: tabular-nums }
th, td { padding: .28rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
th { background: var(--band); white-space: normal; vertical-align: bottom; max-width: 9rem }
th:first-child, td:first-child { text-align: left }
figure { display: inline-block; vertical-align: top; width: 37rem; max-width: 100%; margin: 0 .4rem 1.2rem 0 }
figcaption { font-weight: 600 } svg { width: 100%; height: auto; font-family: system-ui, sans-serif }
pre { overflow-x: auto; background: var(--band); padding: .7rem; font-size: .8rem }
"""


@dataclass(frozen=True)
class Written:
    markdown: Path
    html: Path
    summary: str  # the best-K tables, as Markdown


@dataclass(frozen=True)
class Report:
    """Everything that both pages show."""

    title: str
    setting: str
    results: list[CellResult]
    groups: dict[str, list[Point]]
    best: list[Table]
    beside: list[Table]
    cells: list[Table]
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
    beside = [published_table(p, group) for name, group in groups.items() for p in matching(target, name)]
    return Report(
        title=f"Sweep {suite.get('name', folder.name)}",
        setting=setting(results, suite),
        results=results,
        groups=groups,
        best=[best_table(name, group) for name, group in groups.items()],
        beside=beside,
        cells=[cell_table(name, group) for name, group in groups.items()],
        doubts=warnings(groups),
        failures=failures,
    )


def setting(results: list[CellResult], suite: dict[str, Any]) -> str:
    """Where and with what this was measured, in one paragraph."""
    one = next(r for r in results if r.ok)
    versions = ", ".join(f"{name} {number}" for name, number in one.versions.items())
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


READING = (
    "AL is the acceptance length, bonus token included: 1 + accepted draft tokens / drafts, from the server's "
    "counters. c is the number of requests in flight. A ratio is in doubt (?) when its range over repeats holds 1, "
    "or when there is one repeat only. docs/benchmarking.md states every formula."
)


def parts(report: Report) -> Iterator[str | Plot]:
    """The report from top to bottom."""
    yield f"# {report.title}"
    yield from (report.setting, READING)
    yield from map(markdown_table, report.best)
    if report.failures:
        yield "## Failed cells\n\n" + _bullets(report.failures)
    if report.doubts:
        yield "## Ratios in doubt\n\n" + _bullets(report.doubts)
    for name, group in report.groups.items():
        yield f"## Plots, {name}"
        yield from sweep_plots(name, group)
    yield from map(markdown_table, (*report.beside, *report.cells))


def markdown_table(t: Table, level: int = 2) -> str:
    """A table under a heading of this level."""
    lines = [t.header, ("---",) * len(t.header), *t.rows]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{'#' * level} {t.title}\n\n{text}" + (f"\n\n{t.note}" if t.note else "")


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def html_page(title: str, content: Iterable[str | Plot], more: str = "") -> str:
    """A self-contained page of Markdown and plots; ``more`` is HTML and comes last."""
    to_html = MarkdownIt("commonmark", {"html": False}).enable("table").render
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
    first = {(r.cell.arm, r.cell.k): r for r in reversed(results)}
    found = ["<h2>Configuration</h2>"]
    for (arm, k), r in reversed(first.items()):
        whole = {"configuration": r.configuration, "versions": r.versions, "hardware": r.hardware}
        name, text = (f"{arm}, K={k}" if k else arm), escape(json.dumps(whole, indent=1))
        found.append(f"<details><summary>{escape(name)}</summary><pre>{text}</pre></details>")
    return "\n".join(found)


def write_report(folder: Path, out: Path) -> Written:
    """Write pages and plots, each whole; raises BenchError when there is nothing to report."""
    report = gather(folder)
    content = list(parts(report))
    files = {f"{PLOTS}/{slug(part.title)}.svg": part for part in content if isinstance(part, Plot)}
    names = {plot: name for name, plot in files.items()}
    text = "\n\n".join(p if isinstance(p, str) else f"![{p.title}]({names[p]})" for p in content) + "\n"
    page = html_page(report.title, content, _configurations(report.results))
    write_whole(out, {name: plot.svg for name, plot in files.items()} | {"report.md": text, "report.html": page})
    summary = "\n\n".join(markdown_table(t) for t in report.best)
    if report.failures:
        summary += f"\n\n{len(report.failures)} cells failed; the report names them."
    if report.doubts:
        summary += "\n\nRatios in doubt:\n\n" + _bullets(report.doubts)
    return Written(out / "report.md", out / "report.html", summary)


def write_whole(folder: Path, files: dict[str, str]) -> None:
    """Write each file whole or not at all, by its path in ``folder``; raises BenchError when that cannot be."""
    try:
        for name, text in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_name(f".{file.name}.{os.getpid()}")
            try:
                partial.write_text(text)
                partial.replace(file)
            finally:
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise BenchError(f"{folder}: cannot be written ({error.strerror})") from None
