"""Write report.md, report.csv and plots/*.svg of a results folder."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pandas
import yaml

from peagle_tools.bench import metrics, plots
from peagle_tools.bench.cells import CellResult, read_results, read_sweep
from peagle_tools.bench.metrics import Point, best_points, number, same_texts
from peagle_tools.bench.schedule import advice
from peagle_tools.bench.suite import slug
from peagle_tools.shared.acceptance import Acceptance, merged, sum_of
from peagle_tools.shared.atomic_files import write_whole
from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.provenance import device

READING = (
    "AL is the acceptance length, bonus token included: 1 + accepted draft tokens / drafts, from the server's "
    "counters. c is the number of requests in flight. A ratio is in doubt (?) when its range over repeats holds 1, or "
    "when there is one repeat only. report.csv holds every cell. docs/bench.md states every formula."
)
REPEATED = "last tokens that occurred before"  # from prompt_lookup_min on look-up drafts


def markdown_table(header: Sequence[object], rows: Iterable[Iterable[object]]) -> str:
    head, *lines = (f"| {' | '.join(map(str, cells))} |" for cells in (header, *rows))
    return "\n".join([head, "|---" * len(header) + "|", *lines])


def section(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> str:
    """A Markdown table under its title."""
    return "\n\n".join(filter(None, [f"## {title}", markdown_table(header, rows), note]))


def cell_table(dataset: str, points: Sequence[Point]) -> str:
    """One row a point: rates, latencies and acceptance."""
    texts = same_texts(points)

    def latency(point: Point, name: str) -> str:
        shown = (number(point.spread(f"{p}_{name}_ms").median, ".1f") for p in ("p50", "p99"))
        return " / ".join(filter(None, shown))

    rows = [
        (
            p.arm,
            str(p.k or ""),
            str(p.concurrency),
            p.tokens_per_second.text(),
            latency(p, "ttft"),
            latency(p, "tpot"),
            p.spread("acceptance_length").text(".2f"),
            " ".join(f"{100 * share:.0f}" for share in p.acceptance),
            number(100 * texts[p.condition]),
            f"{len(p.cells)} of {p.repeats}" if p.failed else f"{p.repeats}",
        )
        for p in points
    ]
    note = (
        "Medians over repeats, in brackets the smallest and largest; latencies at p50 / p99. Same text: answers equal "
        "to those without speculation; only float32 at temperature 0 promises 100."
    )
    header = ("arm", "K", "c", "tokens/s", "TTFT ms", "TPOT ms", "AL", "accepted at position 1..K, %")
    return section(f"All cells, {dataset}", (*header, "same text %", "repeats"), rows, note)


def place_tables(dataset: str, points: Sequence[Point]) -> list[str]:
    """AL of each drafter by where it drafted, over all concurrencies; none without such counts."""
    tables = []
    titles = {"context": "tokens of context", "output": "tokens of output", "repeated": REPEATED}
    for kind, title in titles.items():
        cells = [(p.drafter, getattr(cell.places, kind)) for p in points for cell in p.cells]
        by_drafter = {name: merged(counts for drafter, counts in cells if drafter == name) for name, _ in cells}
        ends = sorted({end for counts in by_drafter.values() for end in counts})
        rows = [
            (name, *(_length(counts[end], counts) if end in counts else "" for end in ends))
            for name, counts in by_drafter.items()
            if counts
        ]
        header = ("drafter", *(str(end) if title == REPEATED else f"up to {end}" for end in ends))
        if rows:
            tables.append(section(f"AL by {title}, {dataset}", header, rows, "In brackets the share of drafts."))
    return tables


def _length(seen: Acceptance, counts: Mapping[int, Acceptance]) -> str:
    """AL, and the share of a drafter's drafts."""
    return f"{seen.length:.2f} ({seen.num_drafts / sum_of(list(counts.values())).num_drafts:.0%})"


def best_table(dataset: str, points: Sequence[Point]) -> str:
    """Output tokens/s of each arm at its best K, then the ratios of each arm to those before it in the suite."""
    best, concurrencies = best_points(points), sorted({p.concurrency for p in points})
    arms = list(dict.fromkeys(p.arm for p in points))

    def rate(point: Point | None) -> str:
        if point is None:
            return "failed"
        return number(point.tokens_per_second.median) + (f" (K={point.k})" if point.k else "")

    def ratio(a: Point | None, b: Point | None) -> str:
        return a.tokens_per_second.over(b.tokens_per_second).text() if a and b else ""

    rows = [[arm, *(rate(best.get((arm, c))) for c in concurrencies)] for arm in arms]
    for b, a in itertools.combinations(arms, 2):
        rows.append([f"{a} / {b}", *(ratio(best.get((a, c)), best.get((b, c))) for c in concurrencies)])
    note = "Output tokens/s at the best K of each arm, and ratios of them; ? marks a ratio in doubt."
    return section(f"Best K, {dataset}", ["", *(f"c={c}" for c in concurrencies)], rows, note)


def as_csv(results: Iterable[CellResult]) -> str:
    """One row for each whole cell; metrics by vLLM's names, times in milliseconds."""
    names = [f"p{p}_{name}_ms" for name in ("ttft", "tpot") for p in (50, 90, 99)]
    names = ["output_throughput", "acceptance_length", *names]
    rows = [asdict(r.cell) | {name: metrics.metric(r, name) for name in names} for r in results if r.ok]
    return pandas.DataFrame(rows).to_csv(index=False, float_format="%.6g")


def warnings(dataset: str, points: Sequence[Point]) -> Iterator[str]:
    """What should not be: one repeat, other text, AL that changes with concurrency."""
    if all(p.repeats < 2 for p in points):
        yield f"{dataset}: one repeat, so its noise is unknown and every ratio in doubt; `--repeats 3` adds two."
    texts = same_texts(points)
    for p in points:
        share = texts[p.condition]
        if p.exact and share < 1:
            yield f"{p.label}: {100 * share:.4g}% of the answers are those without speculation; float32 promises all."
        fewest = min((q for q in points if q.drafter == p.drafter), key=lambda q: q.concurrency)
        length, first = (q.spread("acceptance_length") for q in (p, fewest))
        if length.over(first).falls(0.1) or first.over(length).falls(0.1):
            yield f"{p.label}: AL {length.median:.2f}, but {first.median:.2f} at the smallest concurrency."


def _list(title: str, lines: Sequence[str]) -> list[str]:
    """A heading and a list, an option of a command as code; nothing where there are no lines."""
    shown = (f"\n```\n{line}\n```\n" if line.startswith("--") else f"- {line}" for line in lines)
    return [f"## {title}\n\n" + "\n".join(shown).rstrip()] * bool(lines)


def write_report(folder: Path) -> tuple[str, list[str]]:
    """Write report.md, report.csv and plots/*.svg into ``folder``, each whole. Returns a summary in Markdown and, apart
    because its last line is one to paste, the advice.

    Raises:
        ToolError: no cell is whole; OSError: ``folder`` cannot be written.
    """
    results = read_results(folder)
    failures = [f"{r.cell.label}: {r.reason}" for r in results if not r.ok]
    points = metrics.points(results)
    groups = {name: [p for p in points if p.dataset == name] for name in dict.fromkeys(p.dataset for p in points)}
    if not groups:
        raise ToolError(f"{folder}: all {len(results)} cells failed; the first: {failures[0]}")
    sweep = read_sweep(folder)
    suite, devices = sweep["suite"], " and ".join(sorted({device(r.hardware) for r in results}))
    best = [best_table(name, group) for name, group in groups.items()]
    warned = _list("Warnings", [line for name, group in groups.items() for line in warnings(name, group)])
    served = [line for name, group in groups.items() for line in advice(name, group, suite)]
    text = [f"# Sweep {suite['name']}", f"Measured on {devices}, {results[0].began[:10]}. {READING}", *best, *warned]
    text += _list("Failed cells", failures)
    files = {"report.csv": as_csv(results)}
    for name, group in groups.items():
        text.append(f"## Plots, {name}")
        for plot, title in plots.PLOTS.items():
            file = f"plots/{slug(f'{plot.__name__} {name}')}.svg"
            files[file] = plots.draw(partial(plot, points=group))
            text.append(f"![{title}, {name}]({file})")
        text += [cell_table(name, group), *place_tables(name, group)]
    text += [f"## Setting\n\n```yaml\n{yaml.safe_dump(sweep, sort_keys=False)}```", *_list("Which K to serve", served)]
    files["report.md"] = "\n\n".join(text) + "\n"
    (folder / "plots").mkdir(exist_ok=True)
    for name, content in files.items():
        write_whole(folder / name, content)
    if failures:
        warned.append(f"{len(failures)} cells failed; the report names them.")
    return "\n\n".join([*best, *warned]), served
