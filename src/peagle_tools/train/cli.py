"""``peagle-vllm train``. What the extra brings is imported inside the commands."""

import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from peagle_tools.shared.terminal import fail

app = typer.Typer(
    name="train",
    help="Train a P-EAGLE head: from prompts to a head that vLLM serves.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
TRY_AGAIN = 75  # EX_TEMPFAIL
ConfigArgument = Annotated[Path, typer.Argument(metavar="PEAGLE.yaml", help="What to train; docs/train.md.")]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What cannot go on ends the command with its line: exit status 2, or 75 where a second try may mend it."""
    from safetensors import SafetensorError

    from peagle_tools.shared.errors import ToolError
    from peagle_tools.train import TrainError, TryAgain
    from peagle_vllm.heads.files import HeadError, one_line

    try:
        yield
    except ModuleNotFoundError as error:
        fail(f'{error.name} is not installed: pip install "peagle-vllm[train]" (beside vLLM: requirements/train.txt)')
    except TryAgain as error:
        print(f"peagle-vllm: {error}", file=sys.stderr)
        raise typer.Exit(TRY_AGAIN) from None
    except (TrainError, ToolError, HeadError) as error:
        fail(str(error).rpartition("TrainError: ")[2])  # torch puts its traceback before one of a loader's process
    except KeyboardInterrupt:
        print("\npeagle-vllm: interrupted; the same command goes on", file=sys.stderr)
        raise typer.Exit(130) from None
    except SafetensorError as error:  # such as that of a full disk
        fail(f"a file of tensors: {one_line(error)}; mend that, and the same command goes on")
    except OSError as error:
        fail(f"{error.filename or 'a file'}: {error.strerror}; mend that, and the same command goes on")


@app.callback()
def train() -> None:
    """Train a P-EAGLE head: from prompts to a head that vLLM serves."""


def prompts(
    data: Annotated[
        list[str] | None,
        typer.Argument(metavar="DATA...", help="Files, presets of speculators, or ORG/NAME[:SPLIT] on the hub."),
    ] = None,
    from_target: Annotated[
        int, typer.Option(metavar="N", min=0, help="Let the target itself write N prompts, too (Magpie).")
    ] = 0,
    config: Annotated[
        Path, typer.Option(metavar="PEAGLE.yaml", help="With --from-target: names the target and its engine.")
    ] = Path("peagle.yaml"),
    system: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="With --from-target: after this system prompt; repeatable.")
    ] = None,
    language: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="With --from-target: in this language; repeatable.")
    ] = None,
    apart_from: Annotated[
        list[str] | None,
        typer.Option(metavar="DATA", help="Prompts to measure with: drop what is near to one; repeatable."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the prompts go.")] = Path("prompts.jsonl"),
    pii: Annotated[Literal["presidio", "none"], typer.Option(help="What looks for personal data.")] = "presidio",
    pii_action: Annotated[Literal["drop", "mask"], typer.Option(help="What is done where it is found.")] = "drop",
    pii_ner: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Finds names and places: a model for token classification.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that search.")] = os.cpu_count() or 1,
) -> None:
    """Take the prompts out of data sets, without answers and without personal data, or let the target write some.

    Exit status: 0 written; 2 a data set cannot be read, or nothing is left of it; 75 the target's server ended, and
    the same command goes on.
    """
    if not data and not from_target:
        fail("name data sets, or give --from-target N")
    if pii == "presidio" and not find_spec("presidio_analyzer"):
        fail('presidio_analyzer is not installed: pip install "peagle-vllm[pii]", or give --pii none')
    with one_line_errors():
        from peagle_tools.train.prompts import write_prompts

        sampled: Iterable[dict[str, Any]] = ()
        if from_target:
            from peagle_tools.train.config import read_config
            from peagle_tools.train.from_target import sampled as sample

            file = out.with_suffix(".sampled.jsonl")
            sampled = sample(read_config(config), from_target, system or [], language or [], file)
        report = write_prompts(data or [], out, pii, pii_action, pii_ner, workers, sampled, apart_from or [])
    for what, found in report.items():
        shown = [f"{count} {name}" for name, count in found.items()] if isinstance(found, dict) else found
        print(f"{what}: {'; '.join(shown) or 'nothing'}")


def serve_target(
    file: ConfigArgument,
    hidden_states: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the hidden states of each prompt there.")
    ] = None,
) -> None:
    """Become vLLM's server of the target, for `serve: false`: for answers, or with --hidden-states for these.

    The command line is shown, to be used on other machines too.
    """
    with one_line_errors():
        from urllib.parse import urlsplit

        from peagle_tools.shared.server import COMMAND
        from peagle_tools.train.config import read_config
        from peagle_tools.train.serve import arguments

        config = read_config(file)
        address = urlsplit(config.data.endpoint)
        where = ["--host", str(address.hostname), "--port", str(address.port)]
        command = [*COMMAND, *where, *arguments(config, hidden_states and hidden_states.resolve())]
        print(shlex.join(command), file=sys.stderr, flush=True)
        os.execv(command[0], command)


def step(name: str, file: Path) -> None:
    """Run one step, whose function returns what it did."""
    with one_line_errors():
        from peagle_tools.train.config import read_config

        config = read_config(file)
        module = import_module(f"peagle_tools.train.{'check' if name == 'check' else 'steps'}")
        print(f"{name}: {getattr(module, name)(config)}")


def answers(file: ConfigArgument) -> None:
    """Let the target answer the prompts, as a step of `train pipeline`."""
    step("answers", file)


def data(file: ConfigArgument) -> None:
    """Make token data of the answers, as a step of `train pipeline`."""
    step("data", file)


def states(file: ConfigArgument) -> None:
    """Store the hidden states of all documents, as a step of `train pipeline`."""
    step("states", file)


def check(file: ConfigArgument) -> None:
    """Inspect the best head, and compare its AL in vLLM with replay's; the last step of `train pipeline`."""
    step("check", file)


def run(file: ConfigArgument) -> None:
    """Train a head on documents and their hidden states, or go on where a run was stopped or killed.

    Several GPUs: `torchrun --nproc-per-node 8 -m peagle_tools.cli train run peagle.yaml`; each has its own batches.

    Exit status: 0 trained; 2 it cannot go on, the reason on stderr; 75 stopped, and the same command goes on.
    """
    with one_line_errors():
        from peagle_tools.train.config import read_config
        from peagle_tools.train.replay import by_replay
        from peagle_tools.train.run import train

        trainer = train(read_config(file), by_replay)
    if trainer.rank == 0:
        best, last = trainer.checkpointer.path / "best", trainer.checkpointer.steps()[-1]
        print(f"trained for {last} steps. The best head: {best}, {best.readlink()}; `peagle-vllm inspect {best}`")


def pipeline(
    file: ConfigArgument,
    begin: Annotated[
        Literal["prompts", "answers", "data", "states", "run", "check"] | None,
        typer.Option("--from", help="Do this step and the later ones again: what they wrote is removed."),
    ] = None,
) -> None:
    """All of it: prompts, answers, data, states, run, check. Finished steps are skipped; stopped ones go on.

    Exit status, of this and of each step: 0 done; 2 it cannot go on; 75 it stopped, and the same command goes on.
    """
    with one_line_errors():
        from peagle_tools.train.config import read_config
        from peagle_tools.train.pipeline import pipeline as run_all

        status = run_all(file, read_config(file), begin)
    if status:
        raise typer.Exit(status)


for command in (prompts, serve_target, answers, data, states, run, check, pipeline):
    app.command()(command)
