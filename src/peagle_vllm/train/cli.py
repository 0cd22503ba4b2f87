"""``peagle-vllm train``. What the extra brings is imported inside the commands."""

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from peagle_vllm.bench.cli import fail
from peagle_vllm.train.data_cli import COMMANDS

app = typer.Typer(
    name="train",
    help="Train a P-EAGLE head: from prompts to a head that vLLM serves.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
ConfigArgument = Annotated[Path, typer.Argument(metavar="PEAGLE.yaml", help="What to train; docs/training.md.")]


def check_extra() -> None:
    """Exit with the name of a package that is missing."""
    for name in ("pydantic", "yaml", "torch", "speculators", "datasets"):
        if importlib.util.find_spec(name) is None:
            fail(f'{name} is not installed: pip install "peagle-vllm[train]"; beside vLLM, see requirements/train.txt')


@app.callback()
def train() -> None:
    """Train a P-EAGLE head: from prompts to a head that vLLM serves."""


@app.command()
def run(file: ConfigArgument) -> None:
    """Train a head on documents and their hidden states, or go on where a run was stopped or killed.

    Several GPUs: `torchrun --nproc-per-node 8 -m peagle_vllm.cli train run peagle.yaml`; each has its own batches.

    Exit status: 0 trained; 2 it cannot go on, the reason on stderr; 75 stopped, and the same command goes on.
    """
    check_extra()
    from peagle_vllm.heads.files import HeadError
    from peagle_vllm.train import TrainError
    from peagle_vllm.train.config import read_config

    try:
        config = read_config(file)
        from peagle_vllm.train.replay import by_replay
        from peagle_vllm.train.run import train
        from peagle_vllm.train.trainer import Stopped

        trainer = train(config, by_replay)
    except (TrainError, HeadError) as error:
        fail(str(error).rpartition("TrainError: ")[2])  # torch puts its traceback before one of a loader's process
    except Stopped as stopped:
        print(f"peagle-vllm: {stopped}")
        raise typer.Exit(75) from None
    if trainer.rank == 0:
        best, last = trainer.checkpointer.path / "best", trainer.checkpointer.steps()[-1]
        print(f"trained for {last} steps. The best head: {best}, {best.readlink()}; `peagle-vllm inspect {best}`")


for command in COMMANDS:
    app.command()(command)
