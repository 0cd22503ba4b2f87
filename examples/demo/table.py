"""The table of a demo result, as Markdown: for the README, and rendered by rich on a terminal."""

from collections.abc import Iterator
from typing import Any

HEADER = ("drafter", "K", "AL", "accepted at each position, %", "tokens/s, batch 1", "tokens/s, batch 8", "same output")


def rows(result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for arm in result["arms"]:
        rate = arm["tokens_per_second"]
        yield (
            arm["arm"]["name"],
            str(arm["arm"]["k"] or ""),
            f"{arm['acceptance_length']:.2f}",
            " ".join(f"{100 * share:.0f}" for share in arm["acceptance"]),
            f"{rate['1']:.0f}",
            f"{rate['8']:.0f}",
            "yes" if arm["same_output"] else "NO",
        )


def caption(result: dict[str, Any]) -> str:
    """The configuration, in the words that stand under the table."""
    c = result["configuration"]
    versions = ", ".join(f"{name} {number}" for name, number in c["versions"].items())
    return (
        f"{c['prompts']} held-out chat prompts, {c['max_tokens']} tokens each at most, greedy, {c['dtype']}, eager, "
        f"{c['threads']} thread, median of {c['repeats']} runs. {c['cpu']}; {versions}. "
        f"AL: acceptance length, bonus token included."
    )


def markdown(result: dict[str, Any]) -> str:
    lines = [HEADER, ("---",) * len(HEADER), *rows(result)]
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", caption(result)])
