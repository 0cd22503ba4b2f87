"""``peagle-vllm train``. What the extra brings is imported inside the commands."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from peagle_tools.shared.terminal import one_line_errors

app = typer.Typer(help="Train a P-EAGLE head: from prompts to a head that vLLM serves.", no_args_is_help=True)
ConfigArgument = Annotated[Path, typer.Argument(metavar="PEAGLE.yaml", help="What to train; docs/train.md.")]
STEPS = {
    "prompts": "Take prompts out of data sets, or let the target write them; without answers.",
    "answers": "Let the target answer the prompts.",
    "data": "Make token data of the answers.",
    "states": "Store the hidden states of all documents.",
    "run": "Train a head, or continue where a run was stopped or killed. Several GPUs: "
    "`torchrun --shutdown-timeout 600 --nproc-per-node 8 -m peagle_tools.cli train run peagle.yaml`; each has its own "
    "batches.",
    "check": "Compare the best head's AL in vLLM with that of replay.",
}


def add_step(name: str, text: str) -> None:
    @app.command(name, help=f"{text}\n\nExit status: 0 done; 2 it cannot continue; 75 the same command continues.")
    def step(file: ConfigArgument) -> None:
        with one_line_errors("train"):
            from peagle_tools.train.peagle_yaml import read_config
            from peagle_tools.train.pipeline import alone, do

            config = read_config(file)
            with alone(config.run, is_first=name != "run" or os.environ.get("RANK", "0") == "0"):
                do(name, config)


for step_name, step_help in STEPS.items():
    add_step(step_name, step_help)


@app.command()
def pipeline(
    file: ConfigArgument,
    begin: Annotated[
        Literal["prompts", "answers", "data", "states", "run", "check"] | None,
        typer.Option("--from", help="Do this step and the later ones again: what they wrote is removed."),
    ] = None,
) -> None:
    """All of it: prompts, answers, data, states, run, check. Finished steps are skipped; stopped ones continue.

    Exit status: 0 done; 2 it cannot continue; 75 it stopped, and the same command continues.
    """
    with one_line_errors("train"):
        from peagle_tools.train.peagle_yaml import read_config
        from peagle_tools.train.pipeline import pipeline

        pipeline(file, read_config(file), begin)
