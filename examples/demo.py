"""Drafters on a real model, SmolLM2-135M-Instruct, on this CPU: ``make demo``.

Acceptance lengths (AL) of some prompts of HumanEval and MT-Bench, greedy, and those of all prompts, which
docs/acceptance.md has. The tokens/s are of fewer and shorter answers, one after the other.
"""

import argparse
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.real import ARMS, PLAIN, SETS, Engine, al_of, committed, in_own_process

SHOWN = ("none", "n-gram K=5", "EAGLE-3 K=2", f"{PLAIN} K=3", "P-EAGLE K=3")
TIMED_PROMPTS, TIMED_TOKENS = 4, 64  # of each set, and of an answer
QUESTION = "Compose a haiku about a small model that guesses what a large one will say."


def measured(engine: Engine, prompts: int) -> tuple[dict[str, Any], dict[str, float], str]:
    """Acceptance and tokens/s by set, and the answer to QUESTION, in the process of the engine."""
    speeds = {name: engine.speed(name, 1, TIMED_PROMPTS, TIMED_TOKENS) for name in SETS}
    return dict(engine.acceptance(prompts)), speeds, engine.answer([[QUESTION]], TIMED_TOKENS)[0].text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=5, help="of each set")
    args = parser.parse_args()
    console, table = Console(), Table(title=f"{args.prompts} prompts of each set")
    for column in ("drafter", "prompts", "AL [95%]", "AL of all", "tokens/s"):
        table.add_column(column, justify="left" if column in ("drafter", "prompts") else "right")
    of_all = committed()
    for arm in (arm for arm in ARMS if arm.label in SHOWN):
        with console.status(arm.label):
            cells, speeds, answer = in_own_process(measured, arm, args.prompts)
        for name in SETS:
            al = "{al:.2f} [{al_95[0]:.2f}, {al_95[1]:.2f}]".format(**al_of(np.asarray(cells[name]["counts"])))
            table.add_row(arm.label, name, al, f"{of_all[arm.label][name]['al']:.2f}", f"{speeds[name]:.0f}")
        table.add_section()
    console.print(f"[bold]{QUESTION}[/]\n{answer}\n", table, highlight=False)


if __name__ == "__main__":
    main()
