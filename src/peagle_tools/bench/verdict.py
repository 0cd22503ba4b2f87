"""What a sweep says, in lines: the fastest arm and how sure that is, what should not be, which ratios are in doubt."""

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
        depths = [p for p in points if (p.arm, p.concurrency) == (first.arm, row.concurrency) and p.k < first.k]
        if equal := [p.k for p in depths if rate.repeats > 1 and p.tokens_per_second.high >= rate.low]:
            text += f"; K={min(equal)} is equal within the noise, and cheaper"
        yield text


def warnings(dataset: str, points: Sequence[Point]) -> Iterator[str]:
    """What should not be: lost text, AL that hangs on concurrency, latency lost to speculation, bursts."""
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


def doubts(dataset: str, points: Sequence[Point]) -> Iterator[str]:
    """One line for every ratio of the best-K table that its spread does not carry."""
    ratios = [(row.concurrency, *pair, ratio) for row in best_rows(points) for pair, ratio in row.ratios.items()]
    if ratios and all(ratio.repeats < 2 for *_, ratio in ratios):
        yield f"{dataset}: every ratio, for there is one repeat and its noise is unknown."
        return
    for concurrency, above, below, ratio in ratios:
        where = f"{dataset}, c={concurrency}, {above} / {below} = {ratio.median:.2f}"
        if ratio.repeats < 2:
            yield f"{where}: one repeat, so its noise is unknown."
        elif ratio.overlaps_one:
            yield f"{where}: its range over repeats is {ratio.low:.2f}..{ratio.high:.2f} and holds 1."
