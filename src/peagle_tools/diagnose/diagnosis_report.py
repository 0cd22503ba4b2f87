"""A diagnosis for people, on 80 columns, and for machines."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from peagle_tools.diagnose.interventions import Setup
from peagle_tools.diagnose.search import USUAL, Diagnosis, Trial, irregularities
from peagle_tools.shared.acceptance import Acceptance


def as_dict(setup: Setup, diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis, ready for JSON."""
    return {
        "setup": asdict(setup),  # what was measured
        **_curve(diagnosis.base.curve),
        # By how many last tokens had occurred before.
        "by_repeated": {last: _curve(curve) for last, curve in diagnosis.base.repeated.items()},
        "unusual": irregularities(diagnosis.base.curve),  # what looks wrong there, and what it means, a line each
        "trials": [_trial(trial) for trial in diagnosis.trials],
        "cause": _trial(diagnosis.cause) | {"fix": diagnosis.cause.intervention.fix} if diagnosis.cause else None,
    }


def _curve(curve: Acceptance) -> dict[str, Any]:
    return {
        "acceptance_length": round(curve.length, 4),  # tokens a step of the target, the bonus token included
        "acceptance": [round(rate, 4) for rate in curve.shares],  # share of the drafts, by position
        "drafts": curve.num_drafts,
    }


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        "kind": trial.intervention.kind,
        "change": trial.intervention.change,
        "acceptance_length": [round(length, 4) for length in trial.lengths],  # before, after
        "gain": round(trial.gain, 4),  # relative
        "standard_errors": round(trial.standard_errors, 2),  # that the gain is above zero
    }


def show(console: Console, setup: Setup, diagnosis: Diagnosis) -> None:
    console.print(f"K = {setup.k}, aux layers {list(setup.aux_layers)}, mask token {setup.mask_token_id}, greedy")
    base = diagnosis.base.curve
    console.print(f"acceptance length {base.length:.2f} in {base.num_drafts} drafts\n", style="bold")
    columns = (Column(name, justify="right") for name in ("position", "accepted", "usual"))
    table = Table(*columns, "", box=None, padding=(0, 2, 0, 0))
    for position, share in enumerate(base.shares, start=1):
        low, high = (rate**position for rate in USUAL)
        table.add_row(str(position), f"{share:.0%}", f"{low:.0%} to {high:.0%}", "#" * round(40 * share))
    console.print(table, "")
    for line in irregularities(base):
        console.print(f"unusual  {line}", style="yellow")
    header = ("last tokens that occurred before", "drafts", "AL", "accepted at position 1..K, %")
    table = Table(*header, box=None, padding=(0, 2, 0, 0))
    for last, curve in diagnosis.base.repeated.items():
        shares = " ".join(f"{100 * share:.0f}" for share in curve.shares)
        table.add_row(str(last), str(curve.num_drafts), f"{curve.length:.2f}", shares)
    console.print(table, "")
    if not (cause := diagnosis.cause):
        console.print("no cause: no change raised the acceptance length beyond noise", style="green")
        return
    before, after = cause.lengths
    raised = f"raises the acceptance length from {before:.2f} to {after:.2f} ({cause.gain:+.0%})"
    console.print(f"cause    {cause.intervention.kind}: {cause.intervention.change} {raised}", style="bold red")
    console.print(f"fix      {cause.intervention.fix}", style="green", soft_wrap=True)
    if irregularities(cause.after.curve):
        console.print("acceptance is still unusual with that: fix it, and diagnose again", style="yellow")
