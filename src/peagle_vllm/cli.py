"""``peagle-vllm``: the subcommands of ``peagle_vllm.commands``, ``bench``, ``plan`` and ``train``."""

from typing import Annotated

import typer

from peagle_vllm.bench.cli import app as bench_app
from peagle_vllm.commands.convert import convert
from peagle_vllm.commands.diagnose import diagnose
from peagle_vllm.commands.doctor import doctor
from peagle_vllm.commands.init import init
from peagle_vllm.commands.inspect import inspect
from peagle_vllm.commands.sharpen import sharpen
from peagle_vllm.commands.tune import tune
from peagle_vllm.plan.cli import plan
from peagle_vllm.train.cli import app as train_app

app = typer.Typer(
    name="peagle-vllm",
    help="P-EAGLE, parallel-drafting EAGLE, on vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app)
app.add_typer(train_app)


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


for command in (inspect, convert, diagnose, sharpen, plan, tune, doctor):
    app.command()(command)
bench_app.command()(init)


if __name__ == "__main__":
    app()
