"""Every drafter at its best K on a real model, SmolLM2-135M-Instruct, on this CPU: ``make demo``.

A few prompts of HumanEval and MT-Bench, one after the other, greedy. README's acceptance length (AL) is of all prompts,
both turns, and up to 128 tokens an answer.
"""

import argparse
import sys

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.real import SETS, RealArm, al_of, best_arms, live, read_set


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4, help="of each set")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    args = parser.parse_args()
    console, table = Console(), Table(title=f"{args.prompts} prompts of each set, one at a time", show_lines=True)
    for column in ("drafter", *(f"{name}: {what}" for name in SETS for what in ("AL [95%]", "README", "tokens/s"))):
        table.add_column(column, justify="right" if ":" in column else "left")
    question = read_set("mt-bench")[0][0]
    for row in best_arms():
        arm, cells = RealArm(**row["arm"]), []
        console.print(f"[dim]starts: {arm.label}")
        with live(arm) as call:
            if not table.rows:
                console.print(f"\n[bold]{question}[/]\n")
                call("say", question, args.max_tokens)
            for name in SETS:
                rate, counts = call("timed", name, args.prompts, args.max_tokens, 1)
                found = al_of(np.asarray(counts))
                low, high = found["al_95"]
                cells += [f"{found['al']:.2f} [{low:.2f}, {high:.2f}]", f"{row['sets'][name]['al']:.2f}", f"{rate:.0f}"]
        table.add_row(arm.label, *cells)
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
