"""The table of a demo result: rows once, shown by rich on a terminal and as Markdown in the README."""

from typing import Any

from rich.table import Table

HEADER = ("drafter", "K", "AL", "accepted at each position, %", "tokens/s, batch 1", "tokens/s, batch 8", "same output")


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    table = []
    for arm in result["arms"]:
        rate = arm["tokens_per_second"]
        table.append(
            (
                arm["arm"]["name"],
                str(arm["arm"]["k"] or ""),
                f"{arm['acceptance_length']:.2f}",
                " ".join(f"{100 * share:.0f}" for share in arm["acceptance"]),
                f"{rate['1']:.0f}",
                f"{rate['8']:.0f}",
                "yes" if arm["same_output"] else "NO",
            )
        )
    return table


def caption(result: dict[str, Any]) -> str:
    """The configuration, in the words that stand under the table."""
    c = result["configuration"]
    versions = ", ".join(f"{name} {number}" for name, number in c["versions"].items())
    return (
        f"{c['prompts']} held-out chat prompts, {c['max_tokens']} tokens each at most, greedy, {c['dtype']}, eager, "
        f"{c['threads']} thread, median of {c['repeats']} runs. {c['cpu']}; {versions}. "
        f"AL: acceptance length, bonus token included."
    )


def terminal(result: dict[str, Any]) -> Table:
    table = Table(title="P-EAGLE demo", caption=caption(result), caption_justify="left")
    for name in HEADER:
        left = name in (HEADER[0], HEADER[3])
        narrow = name.replace(", batch", "\nbatch").replace("same ", "same\n").replace(" position", "\nposition")
        table.add_column(narrow, justify="left" if left else "right", no_wrap=name != HEADER[0])
    for row in rows(result):
        table.add_row(*row, style="bold" if row[0].startswith("P-EAGLE") else "")
    return table


def markdown(result: dict[str, Any]) -> str:
    lines = [HEADER, ("---",) * len(HEADER), *rows(result)]
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", caption(result)])
