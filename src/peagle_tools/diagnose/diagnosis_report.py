"""A diagnosis for people, on 80 columns, and for machines."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from peagle_tools.diagnose.interventions import Setup
from peagle_tools.diagnose.search import Diagnosis, Trial, irregularities, usual_rates
from peagle_tools.shared.acceptance import Acceptance, Places

SCHEMA = 1


def as_dict(setup: Setup, diagnosis: Diagnosis, differences: list[str]) -> dict[str, Any]:
    """The diagnosis, ready for JSON."""
    return {
        "schema": SCHEMA,
        "complete": diagnosis.complete,  # False where it was stopped before the end
        "differences": differences,  # what the head's files have otherwise than the target's, a line each
        "setup": asdict(setup),  # what was measured
        **curve_of(diagnosis.curve),
        **by_place(diagnosis.places),
        "unusual": diagnosis.unusual,  # what looks wrong in that curve, and what it means, a line each
        "trials": [_trial(trial) for trial in diagnosis.trials],
        "causes": [_trial(trial) | {"fix": trial.intervention.fix} for trial in diagnosis.causes],
    }


def curve_of(curve: Acceptance) -> dict[str, Any]:
    return {
        "acceptance_length": round(curve.length, 4),  # tokens a step of the target, the bonus token included
        "acceptance": [round(rate, 4) for rate in curve.shares],  # share of the drafts, by position
        "drafts": curve.num_drafts,
    }


def by_place(places: Places) -> dict[str, Any]:
    """By the last number of tokens of each group, and by how many last tokens had occurred before."""
    groups = {"by_context": places.context, "by_output": places.output, "by_repeated": places.repeated}
    return {name: {last: curve_of(seen) for last, seen in counts.items()} for name, counts in groups.items()}


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        "kind": trial.intervention.kind,
        "change": trial.intervention.change,
        "acceptance_length": [round(trial.before.length, 4), round(trial.after.length, 4)],  # before, after
        "gain": round(trial.gain, 4),  # relative
        "standard_errors": round(trial.standard_errors, 2),  # that the gain is above zero
    }


def show(console: Console, setup: Setup, diagnosis: Diagnosis, differences: list[str]) -> None:
    """Print a diagnosis."""
    prompts = "through the chat template" if setup.chat_template else "raw"
    line = f"K = {setup.k}, aux layers {list(setup.aux_layers)}, mask token {setup.mask_token_id}, prompts {prompts}"
    console.print(f"{line}, greedy, {diagnosis.curve.num_drafts} drafts", highlight=False)
    show_curve(console, diagnosis.curve)
    show_places(console, diagnosis.places)
    lines(console, "differs", differences)
    lines(console, "unusual", diagnosis.unusual)
    _show_trials(console, diagnosis.trials)
    for trial in diagnosis.causes:
        before, after = trial.before.length, trial.after.length
        raised = f"raises the acceptance length from {before:.2f} to {after:.2f} ({trial.gain:+.0%})"
        line = f"{trial.intervention.kind}: {trial.intervention.change} {raised}"
        console.print(Text("cause    ", "bold red") + Text(line, "default"), highlight=False)
        console.print(Text("fix      ", "green") + Text(trial.intervention.fix, "default"), soft_wrap=True)
    if not diagnosis.complete:
        console.print(Text("stopped before the end", "yellow"))
    elif diagnosis.causes and irregularities(diagnosis.causes[-1].after):
        console.print(
            Text("acceptance is still unusual with that: it is a part of the cause, or there is another one", "yellow")
        )
    elif not diagnosis.causes:
        console.print(Text("no cause: no change raised the acceptance length beyond noise", "green"))


def show_curve(console: Console, seen: Acceptance) -> None:
    console.print(f"acceptance length {seen.length:.2f}\n", style="bold", highlight=False)
    curve = Table("position", "accepted", "usual", box=None, padding=(0, 2, 0, 0))
    for column in curve.columns:
        column.justify = "right"
    curve.add_column("")
    for position, share in enumerate(seen.shares, start=1):
        low, high = usual_rates(position)
        curve.add_row(str(position), f"{share:.0%}", f"{low:.0%} to {high:.0%}", "#" * round(40 * share))
    console.print(curve, highlight=False)
    console.print()


def show_places(console: Console, places: Places) -> None:
    groups = {"tokens of context": places.context, "tokens of output": places.output}
    for title, counts in (groups | {"last tokens that occurred before": places.repeated}).items():
        table = Table(title, "drafts", "AL", "accepted at position 1..K, %", box=None, padding=(0, 2, 0, 0))
        for last, seen in counts.items():
            shares = " ".join(f"{100 * share:.0f}" for share in seen.shares)
            label = f"up to {last}" if title in groups else str(last)
            table.add_row(label, str(seen.num_drafts), f"{seen.length:.2f}", shares)
        if counts:
            console.print(table, "", highlight=False)


def lines(console: Console, mark: str, texts: list[str]) -> None:
    for text in texts:
        console.print(Text(f"{mark:9}", "yellow") + Text(text, "default"))


def _show_trials(console: Console, trials: list[Trial]) -> None:
    table = Table("tried", box=None, padding=(0, 2, 0, 0))
    for column in ("AL before", "after", "gain"):
        table.add_column(column, justify="right", no_wrap=True)
    for trial in trials:
        before, after = trial.before.length, trial.after.length
        table.add_row(Text(trial.intervention.change), f"{before:.2f}", f"{after:.2f}", f"{trial.gain:+.0%}")
    console.print()
    console.print(table, highlight=False)
    console.print()
