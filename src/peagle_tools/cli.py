"""``peagle-vllm``: every subcommand, each from its folder."""

from typing import Annotated

import typer

from peagle_tools.bench.cli import app as bench_app
from peagle_tools.bench.tune import tune
from peagle_tools.convert.cli import convert
from peagle_tools.diagnose.cli import diagnose
from peagle_tools.doctor.cli import doctor
from peagle_tools.inspect.cli import inspect
from peagle_tools.sharpen.cli import sharpen
from peagle_tools.train.cli import app as train_app

app = typer.Typer(name="peagle-vllm", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(bench_app, name="bench")
app.add_typer(train_app, name="train")


def _version(asked: bool) -> None:
    if asked:
        from peagle_vllm import __version__

        print(f"peagle-vllm {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """P-EAGLE, parallel-drafting EAGLE, on vLLM."""


for command in (inspect, convert, diagnose, doctor, sharpen, tune):
    app.command()(command)


if __name__ == "__main__":
    app()
