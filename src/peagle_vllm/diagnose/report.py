"""A diagnosis for people, on 80 columns, and for machines."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from peagle_vllm.diagnose.interventions import Setup
from peagle_vllm.diagnose.search import LEAST_GAIN, Diagnosis, Trial, usual_rates

SCHEMA = 1
FIELDS = {
    "schema": "version of this shape, a whole number",
    "setup": "object: `aux_layers`, `mask_token_id`, `k`, `chat_template`, `prompt_tokens`: what was measured",
    "acceptance_length": "tokens for each step of the target, the bonus token included",
    "acceptance": "share of the drafts in which each position was accepted, K numbers",
    "drafts": "how often K tokens were drafted",
    "odd": "list of lines: what looks wrong in that curve",
    "trials": "list of objects: `kind`, `change`, `acceptance_length` (before, after), `gain` (relative)",
    "causes": "the trials that raised the acceptance length by 15% or more, and `mend`: what to do for good",
}


def as_dict(setup: Setup, found: Diagnosis) -> dict[str, Any]:
    """The diagnosis, each of ``FIELDS``, ready for JSON."""
    return {
        "schema": SCHEMA,
        "setup": asdict(setup),
        "acceptance_length": round(found.curve.length, 4),
        "acceptance": [round(rate, 4) for rate in found.curve.shares],
        "drafts": found.curve.num_drafts,
        "odd": found.odd,
        "trials": [_trial(trial) for trial in found.trials],
        "causes": [_trial(trial) | {"mend": trial.intervention.mend} for trial in found.causes],
    }


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        "kind": trial.intervention.kind,
        "change": trial.intervention.change,
        "acceptance_length": [round(trial.before.length, 4), round(trial.after.length, 4)],
        "gain": round(trial.gain, 4),
    }


def show(console: Console, setup: Setup, found: Diagnosis) -> None:
    """Print a diagnosis."""
    prompts = "through the chat template" if setup.chat_template else "raw"
    console.print(
        f"K = {setup.k}, aux layers {list(setup.aux_layers)}, mask token {setup.mask_token_id}, prompts {prompts}, "
        f"greedy, {found.curve.num_drafts} drafts",
        highlight=False,
    )
    console.print(f"acceptance length {found.curve.length:.2f}\n", style="bold", highlight=False)
    curve = Table("position", "accepted", "usual", box=None, padding=(0, 2, 0, 0))
    for column in curve.columns:
        column.justify = "right"
    curve.add_column("")
    for position, share in enumerate(found.curve.shares, start=1):
        low, high = usual_rates(position)
        curve.add_row(str(position), f"{share:.0%}", f"{low:.0%} to {high:.0%}", "#" * round(40 * share))
    console.print(curve, highlight=False)
    console.print()
    for line in found.odd:
        console.print(Text("odd      ", "yellow") + Text(line, "default"))
    if found.trials:
        _show_trials(console, found.trials)
    for trial in found.causes:
        before, after = trial.before.length, trial.after.length
        raised = f"raises the acceptance length from {before:.2f} to {after:.2f} ({trial.gain:+.0%})"
        line = f"{trial.intervention.kind}: {trial.intervention.change} {raised}"
        console.print(Text("cause    ", "bold red") + Text(line, "default"), highlight=False)
        console.print(Text("mend     ", "green") + Text(trial.intervention.mend, "default"), soft_wrap=True)
    if not found.odd and not found.causes:
        console.print(Text("a usual curve; no cause to look for", "green"))
    elif not found.causes:
        why = f"no cause: nothing tried raised the acceptance length by {LEAST_GAIN:.0%} or more"
        console.print(Text(why if found.trials else "nothing to try", "yellow"))


def _show_trials(console: Console, trials: list[Trial]) -> None:
    table = Table("tried", box=None, padding=(0, 2, 0, 0))
    for column in ("AL before", "after", "gain"):
        table.add_column(column, justify="right", no_wrap=True)
    for trial in trials:
        before, after = trial.before.length, trial.after.length
        table.add_row(trial.intervention.change, f"{before:.2f}", f"{after:.2f}", f"{trial.gain:+.0%}")
    console.print()
    console.print(table, highlight=False)
    console.print()
