"""What ``peagle-vllm plan`` prints."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from peagle_tools.plan import backtest
from peagle_tools.plan.advice import Outlook, break_even, choose, why_not
from peagle_tools.plan.fit import Fitted, Judged
from peagle_tools.plan.model import ONE_STEP, Costs, speedup
from peagle_tools.plan.profile import Profile


def _table(title: str, *columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left", title_style="bold")
    for name in columns:
        table.add_column(name, justify="right")
    return table


def concurrencies(up_to: int) -> list[int]:
    """1, 2, 4 ... up_to."""
    return sorted({2**i for i in range(up_to.bit_length())} | {up_to})


def costs_line(fitted: Fitted) -> str:
    costs = fitted.costs
    steps = ", ".join(f"{ms:.1f} ms at c={n:g}" for n, ms in costs.target.points)
    forwards = f" and {costs.forward:.2f} ms for each of its K draft forwards" if costs.forward else ""
    assumed = f" {fitted.assumed}" if fitted.assumed else ""
    return (
        f"{fitted.arm}, {fitted.dataset}: target step {steps}; a round adds {costs.once:.2f} ms{forwards}, each "
        f"drafted token of each request {costs.per_token:.3f} ms (drafting and verifying it). "
        f"Fitted to K={', '.join(map(str, fitted.depths))}.{assumed}"
    )


def show_fit(console: Console, fitted: Fitted, judged: Sequence[Judged]) -> None:
    """The model beside the cells, with its error."""
    console.print(costs_line(fitted))
    table = _table("Model beside measured cells", "K", "c", "measured tokens/s", "model", "error", "")
    for j in judged:
        measured, role = f"{j.point.tokens_per_second.median:.0f}", "fitted" if j.used else "predicted"
        depth, c = str(j.point.k or ""), str(j.point.concurrency)
        table.add_row(depth, c, measured, f"{j.predicted:.0f}", f"{j.error:+.0%}", role)
    console.print(table)
    if predicted := [abs(j.error) for j in judged if not j.used]:
        console.print(f"Largest error of a predicted cell: {max(predicted):.0%}")


def show_advice(console: Console, outlook: Outlook, up_to: int, known_to: int) -> None:
    """The depth by concurrency, and break-even."""
    table = _table("Which K", "c", "K", "speedup", "tokens/s", "equal within the error", "")
    for c in (choose(outlook, requests) for requests in concurrencies(up_to)):
        role = "measured" if c.measured else "extrapolated" if c.requests > known_to else "model"
        close = ", ".join(f"K={k}" for k in c.close)
        table.add_row(str(c.requests), str(c.k), f"{c.speedup:.2f}", f"{c.tokens_per_second:.0f}", close, role)
    console.print(table)
    console.print(f"Depths within {outlook.error:.0%}, the error, count as equal: the smallest of them is taken.")
    found = break_even(outlook, up_to)
    where = f"c={found}" if found else f"none up to c={up_to}"
    console.print(f"Break-even concurrency: {where}{' (extrapolated)' if (found or up_to) > known_to else ''}")
    if found:
        console.print(f"Do not speculate from c={found} on: {why_not(outlook, found)}.")


def show_textbook(console: Console, profile: Profile, draft_cost: float, depths: Sequence[int]) -> None:
    """AL and speedup by K where verifying costs one target step."""
    console.print("Hypothetical: nothing here was measured.")
    title = f"A draft forward costs {draft_cost:g} of a target step; verifying costs one"
    table = _table(title, "K", "AL", "EAGLE-3", "P-EAGLE", "gains while a draft costs less than")
    for k in depths:
        ways = (Costs(ONE_STEP, forward=draft_cost), Costs(ONE_STEP, once=draft_cost))
        length = profile.length(k)
        limit = f"{(length - 1) / k:.3f} (EAGLE-3), {length - 1:.3f} (P-EAGLE)"
        table.add_row(str(k), f"{length:.2f}", *(f"{speedup(costs, profile, 1, k):.2f}" for costs in ways), limit)
    console.print(table)


def show_published(console: Console) -> None:
    """The planner's choices on the published figures, and every input that had to be assumed."""
    full = "if rows cost in full: P-EAGLE, EAGLE-3, P/E"
    for figures in backtest.judged():
        best = ", ".join(f"{kind} K={k}" for kind, k in figures.best_k.items())
        title = f"{figures.name}: published best {best}"
        table = _table(title, "c", "P-EAGLE", "EAGLE-3", "P/E model", "P/E published", full)
        for v in backtest.verdicts(figures):
            parallel, sequential = ([f"K={v.best[kind, b]}" for b in backtest.BOUNDS] for kind in backtest.DRAFT_COST)
            extreme = f"{parallel[1]}, {sequential[1]}, {v.ratio['full']:.2f}{' (extrapolated)' * v.extrapolated}"
            ratios = f"{v.ratio['free']:.2f}", f"{v.published:.2f}"
            table.add_row(str(v.concurrency), parallel[0], sequential[0], *ratios, extreme)
        console.print(table)
        found = backtest.verdicts(figures)
        for kind in backtest.DRAFT_COST:
            free, full = (backtest.chosen(found, kind, bound) for bound in backtest.BOUNDS)
            console.print(f"{kind}: published K={figures.best_k[kind]}.")
            console.print(f"  The model chooses {free} if verifying is free, and {full} if rows cost in full.")
        above = sum(v.ratio["free"] > v.published for v in found)
        console.print(f"The model's P/E is above the published one at {above} of {len(found)} concurrencies.")
        limit, assumed = backtest.holds_from(figures), backtest.DRAFT_COST["EAGLE-3"]
        console.print(
            f"At one request EAGLE-3 is best at K=3 as long as a draft forward costs more than {limit:.3f} of a target "
            f"step (assumed: {assumed:.2f}).\n"
        )
    console.print(f"Published: {figures.source}; {figures.hardware}.")
    console.print("Assumed, because it was not published:")
    for line in backtest.ASSUMED:
        console.print(f"  - {line}")
