"""Write report.md and report.html of a results folder."""

import json
import os
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from peagle_vllm.bench import BenchError
from peagle_vllm.bench.cells import CellResult, read_results, read_sweep
from peagle_vllm.bench.metrics import Point, points
from peagle_vllm.bench.report import plots
from peagle_vllm.bench.report.page import page, table
from peagle_vllm.bench.report.published import matching
from peagle_vllm.bench.report.tables import (
    Table,
    best_table,
    by_dataset,
    cell_table,
    published_table,
    warnings,
)
from peagle_vllm.provenance import device


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


def markdown(report: Report) -> str:
    parts = [f"# {report.title}", report.setting, READING]
    parts += [markdown_table(t) for t in report.best]
    if report.failures:
        parts += ["## Failed cells", "\n".join(f"- {line}" for line in report.failures)]
    if report.doubts:
        parts += ["## Ratios in doubt", "\n".join(f"- {line}" for line in report.doubts)]
    parts += [markdown_table(t) for t in (*report.beside, *report.cells)]
    return "\n\n".join(parts) + "\n"


def markdown_table(t: Table, level: int = 2) -> str:
    """A table under a heading of this level."""
    lines = [t.header, ("---",) * len(t.header), *t.rows]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{'#' * level} {t.title}\n\n{text}" + (f"\n\n{t.note}" if t.note else "")


def html(report: Report) -> str:
    parts = [f"<h1>{escape(report.title)}</h1>", f'<p class="soft">{escape(report.setting)}</p>']
    parts.append(f"<p>{escape(READING)}</p>")
    parts += [_html_table(t) for t in report.best]
    if report.failures:
        items = "".join(f"<li>{escape(line)}</li>" for line in report.failures)
        parts.append(f'<h2>Failed cells</h2><ul class="warn">{items}</ul>')
    if report.doubts:
        items = "".join(f"<li>{escape(line)}</li>" for line in report.doubts)
        parts.append(f'<h2>Ratios in doubt</h2><ul class="warn">{items}</ul>')
    for name, group in report.groups.items():
        drawn = [plots.throughput(name, group), plots.pareto(name, group)]
        if any(p.k for p in group):
            drawn += [plots.acceptance_length(name, group), plots.acceptance_by_position(name, group)]
        drawn += plots.speedups(name, group)
        parts.append(f'<h2>Plots, {escape(name)}</h2><div class="plots">{"".join(drawn)}</div>')
    parts += [_html_table(t) for t in (*report.beside, *report.cells)]
    parts.append("<h2>Configuration</h2>" + "".join(_configurations(report.results)))
    return page(report.title, parts)


def _html_table(t: Table) -> str:
    note = f'<p class="soft">{escape(t.note)}</p>' if t.note else ""
    return f"<h2>{escape(t.title)}</h2>{table(t.header, t.rows)}{note}"


def _configurations(results: list[CellResult]) -> list[str]:
    """The whole configuration of the first cell of each arm and depth."""
    first = {(r.cell.arm, r.cell.k): r for r in reversed(results)}
    found = []
    for (arm, k), r in reversed(first.items()):
        whole = {"configuration": r.configuration, "versions": r.versions, "hardware": r.hardware}
        name = f"{arm}, K={k}" if k else arm
        text = escape(json.dumps(whole, indent=1))
        found.append(f"<details><summary>{escape(name)}</summary><pre>{text}</pre></details>")
    return found


def write_report(folder: Path, out: Path) -> Written:
    """Write both pages whole; raises BenchError when there is nothing to report."""
    report = gather(folder)
    texts = {out / "report.md": markdown(report), out / "report.html": html(report)}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            partial = file.with_name(f".{file.name}.{os.getpid()}")
            try:
                partial.write_text(text)
                partial.replace(file)
            finally:
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise BenchError(f"{out}: cannot be written ({error.strerror})") from None
    md, page_file = texts
    summary = "\n\n".join(markdown_table(t) for t in report.best)
    if report.failures:
        summary += f"\n\n{len(report.failures)} cells failed; the report names them."
    if report.doubts:
        summary += "\n\nRatios in doubt:\n\n" + "\n".join(f"- {line}" for line in report.doubts)
    return Written(md, page_file, summary)
