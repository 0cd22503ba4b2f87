"""A diagnosis for people, on 80 columns, and for machines."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from peagle_tools.diagnose.interventions import Setup
from peagle_tools.diagnose.search import USUAL, Diagnosis, Trial, irregularities
from peagle_tools.shared.acceptance import Acceptance, Places

SCHEMA = 2


def as_dict(setup: Setup, diagnosis: Diagnosis, differences: list[str]) -> dict[str, Any]:
    """The diagnosis, ready for JSON."""
    return {
        "schema": SCHEMA,
        "complete": diagnosis.complete,  # False where it was stopped before the end
        "differences": differences,  # what the head's files have otherwise than the target's, a line each
        "setup": asdict(setup),  # what was measured
        **curve_of(diagnosis.base.curve),
        **by_place(diagnosis.base.places),
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
    return {name: {last: curve_of(curve) for last, curve in counts.items()} for name, counts in groups.items()}


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        "kind": trial.intervention.kind,
        "change": trial.intervention.change,
        "acceptance_length": [round(length, 4) for length in trial.lengths],  # before, after
        "gain": round(trial.gain, 4),  # relative
        "standard_errors": round(trial.standard_errors, 2),  # that the gain is above zero
    }


def progress(diagnosis: Diagnosis) -> str:
    """What was measured last."""
    if not diagnosis.trials:
        return f"acceptance length {diagnosis.base.curve.length:.2f}"
    before, after = diagnosis.trials[-1].lengths
    return f"{diagnosis.trials[-1].intervention.change}: {before:.2f} -> {after:.2f}"


def console() -> Console:
    """Shows names of tokens as they are, whatever brackets they have."""
    return Console(markup=False, highlight=False)


def show(console: Console, setup: Setup, diagnosis: Diagnosis, differences: list[str]) -> None:
    """Print a diagnosis."""
    line = f"K = {setup.k}, aux layers {list(setup.aux_layers)}, mask token {setup.mask_token_id}"
    console.print(f"{line}, greedy, {diagnosis.base.curve.num_drafts} drafts")
    show_curve(console, diagnosis.base.curve)
    show_places(console, diagnosis.base.places)
    lines(console, "differs", differences)
    lines(console, "unusual", diagnosis.unusual)
    _show_trials(console, diagnosis.trials)
    for trial in diagnosis.causes:
        before, after = trial.lengths
        raised = f"raises the acceptance length from {before:.2f} to {after:.2f} ({trial.gain:+.0%})"
        console.print(f"cause    {trial.intervention.kind}: {trial.intervention.change} {raised}", style="bold red")
        console.print(f"fix      {trial.intervention.fix}", style="green", soft_wrap=True)
    if not diagnosis.complete:
        console.print("stopped before the end", style="yellow")
    elif not diagnosis.causes:
        console.print("no cause: no change raised the acceptance length beyond noise", style="green")
    elif irregularities(diagnosis.causes[-1].after.curve):
        line = "acceptance is still unusual with that: it is a part of the cause, or there is another one"
        console.print(line, style="yellow")


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, padding=(0, 2, 0, 0))


def show_curve(console: Console, curve: Acceptance) -> None:
    console.print(f"acceptance length {curve.length:.2f}\n", style="bold")
    table = _table("position", "accepted", "usual")
    for column in table.columns:
        column.justify = "right"
    table.add_column("")
    for position, share in enumerate(curve.shares, start=1):
        low, high = (rate**position for rate in USUAL)
        table.add_row(str(position), f"{share:.0%}", f"{low:.0%} to {high:.0%}", "#" * round(40 * share))
    console.print(table, "")


def show_places(console: Console, places: Places) -> None:
    groups = {"tokens of context": places.context, "tokens of output": places.output}
    for title, counts in (groups | {"last tokens that occurred before": places.repeated}).items():
        table = _table(title, "drafts", "AL", "accepted at position 1..K, %")
        for last, curve in counts.items():
            shares = " ".join(f"{100 * share:.0f}" for share in curve.shares)
            label = f"up to {last}" if title in groups else str(last)
            table.add_row(label, str(curve.num_drafts), f"{curve.length:.2f}", shares)
        if counts:
            console.print(table, "")


def lines(console: Console, mark: str, texts: list[str]) -> None:
    for text in texts:
        console.print(f"{mark:9}{text}", style="yellow")


def _show_trials(console: Console, trials: list[Trial]) -> None:
    table = _table("tried")
    for column in ("AL before", "after", "gain"):
        table.add_column(column, justify="right", no_wrap=True)
    for trial in trials:
        before, after = trial.lengths
        table.add_row(trial.intervention.change, f"{before:.2f}", f"{after:.2f}", f"{trial.gain:+.0%}")
    console.print("", table, "", sep="\n")
