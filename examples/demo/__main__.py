"""Every drafter at its best K on a real model, SmolLM2-135M-Instruct, on this CPU: ``make demo``.

A few prompts of HumanEval and MT-Bench, one after the other, greedy. README's acceptance length (AL) is of all prompts,
both turns, and up to 128 tokens an answer.
"""

import argparse
import sys
from contextlib import ExitStack

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.real import SETS, RealArm, al_of, best_arms, live, read_set


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4, help="of each set")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    args = parser.parse_args()
    console, table = Console(), Table(title=f"{args.prompts} prompts of each set, one at a time")
    for column in ("drafter", "prompts", "AL [95%]", "AL in README", "tokens/s"):
        table.add_column(column, justify="left" if column in ("drafter", "prompts") else "right")
    rows, question = best_arms(), read_set("mt-bench")[0][0]
    drafters = [RealArm(**row["arm"]) for row in rows]
    with ExitStack() as stack:
        calls = [stack.enter_context(live(arm)) for arm in drafters]
        with console.status(f"starting {len(calls)} engines"):
            for call in calls:
                call("prompt", ["Hello"])  # waits for it
        console.print(f"[bold]{question}[/]\n")
        calls[-1]("say", question, args.max_tokens)
        for row, arm, call in zip(rows, drafters, calls, strict=True):
            for name in SETS:
                rate, counts = call("timed", name, args.prompts, args.max_tokens, 1)
                found = al_of(np.asarray(counts))
                low, high = found["al_95"]
                of_all = f"{row['sets'][name]['al']:.2f}"
                table.add_row(arm.label, name, f"{found['al']:.2f} [{low:.2f}, {high:.2f}]", of_all, f"{rate:.0f}")
            table.add_section()
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
