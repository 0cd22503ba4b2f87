"""Write report.md, report.csv and plots/*.svg of a results folder."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peagle_tools.bench import BenchError, plots
from peagle_tools.bench.cells import CellResult, read_results, read_sweep, write_whole
from peagle_tools.bench.metrics import (
    PERCENTILES,
    Point,
    best_rows,
    by_dataset,
    metrics_of,
    number,
    points,
    same_texts,
)
from peagle_tools.bench.schedule import advice
from peagle_tools.bench.suite import slug
from peagle_tools.bench.verdict import verdict, warnings
from peagle_tools.shared.provenance import device

READING = (
    "AL is the acceptance length, bonus token included: 1 + accepted draft tokens / drafts, from the server's "
    "counters. c is the number of requests in flight. A ratio is in doubt (?) when its range over repeats holds 1, or "
    "when there is one repeat only. report.csv holds every cell. docs/benchmarking.md states every formula."
)


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


def cell_table(dataset: str, points: Sequence[Point]) -> Table:
    """One row a point: rates, latencies and acceptance."""
    base = {p.concurrency: p for p in points if p.kind == "none"}

    def tail(point: Point, name: str) -> str:
        shown = (number(point.spread(name, at).median, ".1f") for at in (0, 2))
        return " / ".join(filter(None, shown))

    rows = [
        (
            p.arm,
            str(p.k or ""),
            str(p.concurrency),
            p.tokens_per_second.text(),
            tail(p, "ttft"),
            tail(p, "tpot"),
            p.spread("acceptance_length").text(".2f"),
            " ".join(f"{100 * share:.0f}" for share in p.acceptance),
            number(100 * same_texts(p, base.get(p.concurrency))),
            f"{len(p.cells)} of {p.repeats}" if p.failed else f"{p.repeats}",
        )
        for p in points
    ]
    note = (
        "Medians over repeats, in brackets the smallest and largest; latencies at p50 / p99. Same text: answers equal "
        "to those without speculation; only float32 at temperature 0 promises 100."
    )
    header = ("arm", "K", "c", "tokens/s", "TTFT ms", "TPOT ms", "AL", "accepted at position 1..K, %")
    return Table(f"All cells, {dataset}", (*header, "same text %", "repeats"), rows, note)


def best_tables(dataset: str, points: Sequence[Point]) -> list[Table]:
    """Output tokens/s of each arm at its best K, and the ratios between them."""
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


def as_csv(results: Iterable[CellResult]) -> str:
    """One row for each whole cell; times in milliseconds."""
    names = [f"{name}_p{p}" for name in ("ttft", "tpot") for p in PERCENTILES]
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(("arm", "k", "dataset", "concurrency", "repeat", "tokens_per_second", "acceptance_length", *names))
    for r in results:
        if r.ok:
            m = metrics_of(r)
            values = (m.output_tokens_per_second, m.acceptance_length, *m.ttft, *m.tpot)
            rows.writerow((*asdict(r.cell).values(), *(number(value, ".6g") for value in values)))
    return out.getvalue()


@dataclass(frozen=True)
class Report:
    """What a results folder says, over all data sets."""

    title: str
    setting: str
    results: list[CellResult]
    groups: dict[str, list[Point]]
    best: list[Table]
    verdict: list[str]
    warnings: list[str]
    failures: list[str]
    advice: list[str]


def gather(folder: Path) -> Report:
    """Read a results folder; raises BenchError when it holds no whole cell."""
    results = read_results(folder)
    failures = [f"{r.cell.label}: {r.reason}" for r in results if not r.ok]
    groups = by_dataset(points(results))
    if not groups:
        raise BenchError(f"{folder}: all {len(results)} cells failed; the first: {failures[0]}")
    suite: dict[str, Any] = read_sweep(folder).get("suite", {})
    return Report(
        title=f"Sweep {suite.get('name', folder.name)}",
        setting=setting(results, suite),
        results=results,
        groups=groups,
        best=[table for name, group in groups.items() for table in best_tables(name, group)],
        verdict=[line for name, group in groups.items() for line in verdict(name, group)],
        warnings=[line for name, group in groups.items() for line in warnings(name, group)],
        failures=failures,
        advice=[line for name, group in groups.items() for line in advice(name, group, suite)],
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


def bullets(lines: Iterable[str]) -> str:
    """A list in Markdown; an option of a command stands apart from it, as code."""
    return "\n".join(f"\n```\n{line}\n```\n" if line.startswith("--") else f"- {line}" for line in lines).rstrip()


def _section(title: str, lines: Sequence[str]) -> list[str]:
    """A heading and a list; nothing where there are no lines."""
    return [f"## {title}\n\n{bullets(lines)}"] * bool(lines)


def write_report(folder: Path, out: Path) -> tuple[str, list[str]]:
    """Write report.md, report.csv and plots/*.svg into ``out``, each whole. Returns a summary in Markdown and, apart
    because its last line is one to paste, the advice.

    Raises:
        BenchError: there is nothing to report, or ``out`` cannot be written.
    """
    found = gather(folder)
    fastest, warned = _section("Fastest", found.verdict), _section("Warnings", found.warnings)
    best = [markdown_table(table) for table in found.best]
    text = [f"# {found.title}", *fastest, *warned, f"## What was measured\n\n{found.setting}\n\n{READING}", *best]
    text += _section("Failed cells", found.failures)
    files = {"report.csv": as_csv(found.results)}
    for name, group in found.groups.items():
        text.append(f"## Plots, {name}")
        for plot in (plots.throughput, plots.pareto, plots.acceptance_length):
            file, drawn = f"plots/{slug(f'{plot.__name__} {name}')}.svg", plot(name, group)
            files[file] = drawn.svg
            text.append(f"![{drawn.title}]({file})")
        text.append(markdown_table(cell_table(name, group)))
    files["report.md"] = "\n\n".join([*text, *_section("Which K to serve", found.advice)]) + "\n"
    try:
        for name, content in files.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(out / name, content)
    except OSError as error:
        raise BenchError(f"{out}: cannot be written ({error.strerror})") from None
    if found.failures:
        warned.append(f"{len(found.failures)} cells failed; the report names them.")
    return "\n\n".join([*fastest, *warned, *best]), found.advice
