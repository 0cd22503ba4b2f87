"""Write report.md of a results folder. docs/bench.md explains its columns."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import yaml

from peagle_tools.bench import metrics
from peagle_tools.bench.cells import read_results
from peagle_tools.bench.metrics import AL, Point, by_speed, number, same_texts
from peagle_tools.bench.schedule import advice
from peagle_tools.shared.acceptance import merged
from peagle_tools.shared.atomic_files import write_whole
from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.provenance import device


def markdown_table(header: Sequence[object], rows: Iterable[Iterable[object]]) -> str:
    head, *lines = (f"| {' | '.join(map(str, cells))} |" for cells in (header, *rows))
    return "\n".join([head, "|---" * len(header) + "|", *lines])


def section(title: str, header: Sequence[str], rows: Iterable[Sequence[object]], note: str) -> str:
    """A Markdown table under its title."""
    return "\n\n".join([f"## {title}", markdown_table(header, rows), note])


def cell_table(dataset: str, points: Sequence[Point]) -> str:
    """One row a point: rates, latencies and acceptance."""
    texts = same_texts(points)

    def latency(point: Point, name: str) -> str:
        return " / ".join(number(point.spread(f"{p}_{name}_ms").median, ".1f") for p in ("p50", "p99"))

    rows = []
    for p in points:
        speed = p.tokens_per_second.text(), latency(p, "ttft"), latency(p, "tpot")
        accepted = p.spread(AL).text(".2f"), " ".join(f"{100 * share:.0f}" for share in p.acceptance)
        repeats = f"{len(p.cells)} of {p.repeats}" if p.failed else p.repeats
        rows.append((p.arm, p.k or "", p.concurrency, *speed, *accepted, number(100 * texts[p.label]), repeats))
    note = "Medians over repeats, in brackets the smallest and largest; latencies at p50 / p99. c: requests in flight."
    header = ("arm", "K", "c", "tokens/s", "TTFT ms", "TPOT ms", "AL", "accepted at position 1..K, %")
    return section(f"All cells, {dataset}", (*header, "same text %", "repeats"), rows, note)


def repeated_table(dataset: str, points: Sequence[Point]) -> list[str]:
    """AL of each drafter by how many last tokens occurred before, over all concurrencies; empty without such counts."""
    rows = []
    columns = sorted({n for p in points for cell in p.cells for n in cell.repeated})
    for drafter in dict.fromkeys(p.drafter for p in points):
        counts = merged(cell.repeated for p in points if p.drafter == drafter for cell in p.cells)
        drafts = sum(seen.num_drafts for seen in counts.values())
        shown = {n: f"{seen.length:.2f} ({seen.num_drafts / drafts:.0%})" for n, seen in counts.items()}
        if shown:
            rows.append((drafter, *(shown.get(n, "") for n in columns)))
    title = f"AL by last tokens that occurred before, {dataset}"
    note = "In brackets the share of drafts. From `prompt_lookup_min` on look-up drafts, below it the head."
    return [section(title, ("drafter", *map(str, columns)), rows, note)] * bool(rows)


def best_table(dataset: str, points: Sequence[Point]) -> str:
    """Output tokens/s of each arm at its best K, then the ratios of each arm to those before it in the suite."""
    best = {}
    for p in sorted(points, key=by_speed):  # the fastest of an arm comes last
        best[p.arm, p.concurrency] = p
    arms, concurrencies = list(dict.fromkeys(p.arm for p in points)), sorted({p.concurrency for p in points})

    def rate(p: Point | None) -> str:
        return number(p.tokens_per_second.median) + (f" (K={p.k})" if p.k else "") if p else "no result"

    def ratio(a: Point | None, b: Point | None) -> str:
        return a.tokens_per_second.over(b.tokens_per_second).text() if a and b else ""

    rows = [[arm, *(rate(best.get((arm, c))) for c in concurrencies)] for arm in arms]
    for b, a in itertools.combinations(arms, 2):
        rows.append([f"{a} / {b}", *(ratio(best.get((a, c)), best.get((b, c))) for c in concurrencies)])
    note = "Output tokens/s at the best K of each arm, and ratios of them; ? marks a ratio in doubt."
    return section(f"Best K, {dataset}", ["", *(f"c={c}" for c in concurrencies)], rows, note)


def warnings(dataset: str, points: Sequence[Point]) -> Iterator[str]:
    """What should not be: one repeat, other text, AL that changes with concurrency."""
    if all(p.repeats < 2 for p in points):
        yield f"{dataset}: one repeat, so its noise is unknown and every ratio in doubt; `--repeats 3` adds two."
    texts = same_texts(points)
    for p in points:
        share = texts[p.label]
        if p.exact and share < 1:
            yield f"{p.label}: {100 * share:.4g}% of the answers are those without speculation; float32 promises all."
        fewest = min((q for q in points if q.drafter == p.drafter), key=lambda q: q.concurrency)
        length, first = p.spread(AL), fewest.spread(AL)
        if length.over(first).falls(0.1) or first.over(length).falls(0.1):
            yield f"{p.label}: AL {length.median:.2f}, but {first.median:.2f} at the smallest concurrency."


def _list(title: str, lines: Sequence[str]) -> list[str]:
    """A heading and a list, an option of a command as code; nothing where there are no lines."""
    shown = (f"\n```\n{line}\n```\n" if line.startswith("--") else f"- {line}" for line in lines)
    return [f"## {title}\n\n" + "\n".join(shown).rstrip()] * bool(lines)


def write_report(folder: Path) -> tuple[str, list[str]]:
    """Write report.md into ``folder``. Returns a summary in Markdown and, apart because its last line is one to paste,
    the advice. ToolError where no cell is whole, or ``folder`` cannot be written.
    """
    sweep, cells = results = read_results(folder)
    failures = [f"{r.cell.label}, repeat {r.cell.repeat}: {r.reason}" for r in cells if not r.ok]
    points = metrics.points(results)
    groups = {name: [p for p in points if p.dataset == name] for name in dict.fromkeys(p.dataset for p in points)}
    if not groups:
        raise ToolError(f"{folder}: all {len(cells)} cells failed; the first: {failures[0]}")
    suite = sweep["suite"]
    best = [best_table(name, group) for name, group in groups.items()]
    warned = _list("Warnings", [line for name, group in groups.items() for line in warnings(name, group)])
    served = [line for name, group in groups.items() for line in advice(name, group, suite)]
    text = [f"# Sweep {suite['name']}", f"Measured on {device(sweep['hardware'])}.", *best, *warned]
    text += _list("Failed cells", failures)
    for name, group in groups.items():
        text += [cell_table(name, group), *repeated_table(name, group)]
    text += [f"## Setting\n\n```yaml\n{yaml.safe_dump(sweep, sort_keys=False)}```", *_list("Which K to serve", served)]
    write_whole(folder / "report.md", "\n\n".join(text) + "\n")
    if failures:
        warned.append(f"{len(failures)} cells failed; the report names them.")
    return "\n\n".join([*best, *warned]), served
