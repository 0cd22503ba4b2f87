"""What ``peagle-vllm plan`` prints."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from peagle_vllm.plan import published as pub
from peagle_vllm.plan.acceptance import Profile
from peagle_vllm.plan.advice import Choice, break_even, choose, schedule, schedule_json, why_not
from peagle_vllm.plan.fit import Fitted, Judged
from peagle_vllm.plan.model import Costs, speedup, textbook


def _table(title: str, *columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left", title_style="bold")
    for name in columns:
        table.add_column(name, justify="right")
    return table


def concurrencies(up_to: int) -> list[int]:
    """1, 2, 4 ... up_to."""
    found = [1]
    while found[-1] * 2 <= up_to:
        found.append(found[-1] * 2)
    return found if found[-1] == up_to else [*found, up_to]


def costs_line(fitted: Fitted) -> str:
    costs = fitted.costs
    steps = ", ".join(f"{ms:.1f} ms at c={n:g}" for n, ms in costs.target.points)
    added = f"a round adds {costs.once:.2f} ms"
    if costs.drafting == "sequential":
        added += f" and {costs.forward:.2f} ms for each of its K draft forwards"
    depths = ", ".join(map(str, fitted.depths))
    assumed = f" {fitted.assumed}" if fitted.assumed else ""
    return (
        f"{fitted.arm}, {fitted.dataset}: target step {steps}; {added}, each drafted token of "
        f"each request {costs.per_token:.3f} ms (drafting and verifying it). Fitted to K={depths}.{assumed}"
    )


def show_fit(console: Console, fitted: Fitted, judged: Sequence[Judged]) -> None:
    """The model beside the cells, with its error."""
    console.print(costs_line(fitted), highlight=False)
    table = _table("Model beside measured cells", "K", "c", "measured tokens/s", "model", "error", "")
    for j in judged:
        p = j.point
        measured = f"{p.tokens_per_second.median:.0f}"
        role = "fitted" if j.used else "predicted"
        table.add_row(str(p.k or ""), str(p.concurrency), measured, f"{j.predicted:.0f}", f"{j.error:+.0%}", role)
    console.print(table)
    predicted = [abs(j.error) for j in judged if not j.used]
    if predicted:
        console.print(f"Largest error of a predicted cell: {max(predicted):.0%}", highlight=False)


def show_advice(
    console: Console, costs: Costs, profile: Profile, depths: Sequence[int], max_num_seqs: int, known_to: float
) -> None:
    """Best K by concurrency, break-even, and the schedule."""
    table = _table("Best K", "c", "K", "speedup", "tokens/s", "within 3%", "")
    choices: list[Choice] = [choose(costs, profile, b, depths) for b in concurrencies(max_num_seqs)]
    for c in choices:
        beyond = "extrapolated" if c.requests > known_to else ""
        close = ", ".join(f"K={k}" for k in c.close)
        table.add_row(str(c.requests), str(c.k), f"{c.speedup:.2f}", f"{c.tokens_per_second:.0f}", close, beyond)
    console.print(table)
    found = break_even(costs, profile, depths, max_num_seqs)
    where = f"c={found}" if found else f"none up to c={max_num_seqs}"
    beyond = " (extrapolated)" if (found or max_num_seqs) > known_to else ""
    console.print(f"Break-even concurrency: {where}{beyond}", highlight=False)
    if found:
        console.print(f"Do not speculate from c={found} on: {why_not(costs, profile, found, depths)}.", highlight=False)
    text = schedule_json(schedule(costs, profile, depths, max_num_seqs))
    if text:
        console.print(
            "For --speculative-config (beyond the concurrency that was measured, measure before you trust it):"
        )
        console.print(f"  {text}", highlight=False, soft_wrap=True)
    else:
        console.print("Speculation does not pay at any concurrency here: leave --speculative-config out.")


def show_textbook(console: Console, profile: Profile, draft_cost: float, depths: Sequence[int]) -> None:
    """AL and speedup by K where verifying costs one target step."""
    table = _table(
        f"A draft forward costs {draft_cost:g} of a target step; verifying costs one",
        "K",
        "AL",
        "EAGLE-3",
        "P-EAGLE",
        "gains while a draft costs less than",
    )
    for k in depths:
        values = [speedup(textbook(draft_cost, way), profile, 1, k) for way in ("sequential", "parallel")]
        gain = profile.length(k) - 1
        limit = f"{gain / k:.3f} (EAGLE-3), {gain:.3f} (P-EAGLE)"
        table.add_row(str(k), f"{profile.length(k):.2f}", *(f"{v:.2f}" for v in values), limit)
    console.print(table)


def show_published(console: Console) -> None:
    """The planner's choices on the published figures, and every input that had to be assumed."""
    for figures in pub.judged():
        words = ", ".join(f"{kind} K={k}" for kind, k in figures.best_k.items())
        title = f"{figures.name}: published best {words}"
        table = _table(
            title,
            "c",
            "P-EAGLE",
            "EAGLE-3",
            "P/E model",
            "P/E published",
            "if rows cost in full: P-EAGLE, EAGLE-3, P/E",
        )
        for v in pub.verdicts(figures):
            full = f"K={v.best['P-EAGLE', 'full']}, K={v.best['EAGLE-3', 'full']}, {v.ratio['full']:.2f}"
            table.add_row(
                str(v.concurrency),
                *(f"K={v.best[kind, 'free']}" for kind in ("P-EAGLE", "EAGLE-3")),
                f"{v.ratio['free']:.2f}",
                f"{v.published:.2f}",
                full + (" (extrapolated)" if v.extrapolated else ""),
            )
        console.print(table)
        limit = pub.holds_from(figures)
        assumed = pub.DRAFT_COST["EAGLE-3"]
        console.print(
            f"EAGLE-3 is best at K=3 as long as a draft forward costs more than {limit:.3f} of a target step "
            f"(assumed: {assumed:.2f}).\n",
            highlight=False,
        )
    console.print(f"Published: {pub.judged()[0].source}; {pub.judged()[0].hardware}.", highlight=False)
    console.print("Assumed, because it was not published:")
    for line in pub.ASSUMED:
        console.print(f"  - {line}", highlight=False)
