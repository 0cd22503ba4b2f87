"""What a sweep says, in lines: the fastest arm and how sure that is, and what should not be."""

from collections.abc import Iterator, Sequence

from peagle_tools.bench.metrics import BURST_SHARE, Point, Ratio, best_rows, number, same_texts, without_speculation


def sure(ratio: Ratio) -> str:
    """The range of a ratio, and whether it is in doubt."""
    if ratio.repeats < 2:
        return "in doubt: one repeat"
    return f"{'in doubt: ' * ratio.in_doubt}{ratio.low:.2f}..{ratio.high:.2f} over {ratio.repeats} repeats"


def verdict(dataset: str, points: Sequence[Point]) -> Iterator[str]:
    """One line for each concurrency: which arm, which K, and how sure that is."""
    for row in best_rows(points):
        first, *rest = sorted(row.best.values(), key=lambda p: -p.tokens_per_second.median)
        rate = first.tokens_per_second
        text = f"{dataset}, c={row.concurrency}: **{first.drafter}**, {number(rate.median)} tokens/s"
        second = [p for p in rest if p.kind != "none"][:1]
        for other in [p for p in rest if p.kind == "none"] + second:
            ratio = rate.over(other.tokens_per_second)
            text += f"; {ratio.median:.2f} x {other.drafter} ({sure(ratio)})"
        yield text


def warnings(dataset: str, points: Sequence[Point]) -> Iterator[str]:
    """What should not be: one repeat, lost text, AL that changes with concurrency, latency lost, bursts."""
    if all(p.repeats < 2 for p in points):
        yield f"{dataset}: one repeat, so its noise is unknown and every ratio in doubt; `--repeats 3` adds two."
    base = without_speculation(points)
    best = {p.condition for row in best_rows(points) for p in row.best.values()}
    for p in points:
        alone = base.get((p.dataset, p.concurrency))
        share = same_texts(p, alone)
        if p.exact and share < 1:
            yield f"{p.label}: {100 * share:.4g}% of the answers are those without speculation; float32 promises all."
        length, first = (
            q.spread("acceptance_length")
            for q in (p, min((q for q in points if q.drafter == p.drafter), key=lambda q: q.concurrency))
        )
        if length.over(first).lost(0.1) or first.over(length).lost(0.1):
            yield f"{p.label}: AL {length.median:.2f}, but {first.median:.2f} at the smallest concurrency."
        if alone and p.k and p.condition in best:
            for name in ("ttft", "tpot"):
                old, new = alone.spread(name, 0), p.spread(name, 0)
                if old.over(new).lost(0.1):
                    yield f"{p.label}: {name.upper()} p50 {new.median:.1f} ms, without speculation {old.median:.1f} ms."
        if bursts := sum(cell.burst > BURST_SHARE for cell in p.cells):
            yield f"{p.label}: latency samples of {bursts} of {len(p.cells)} repeats came in a burst and are left out."
