"""``peagle-vllm``: one function a subcommand. Heavy imports stay inside them, so ``--help`` is quick."""

import json
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from peagle_vllm.bench.cli import app as bench_app
from peagle_vllm.plan.cli import plan

app = typer.Typer(
    name="peagle-vllm",
    help="P-EAGLE, parallel-drafting EAGLE, on vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app)
app.command()(plan)


def _fail(message: str) -> NoReturn:
    """End with a line on stderr and exit status 2: the input is unusable."""
    print(f"peagle-vllm: {message}", file=sys.stderr)
    raise typer.Exit(2)


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


@app.command()
def doctor(
    vllm: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Check this vLLM wheel, or unpacked one, instead of the installed vLLM."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Would P-EAGLE be served here, by which runner, and do the seams with vLLM hold?

    Exit status: 0 all well; 1 a seam has moved, or vLLM is absent or of an unknown version; 2 PATH is no vLLM.
    """
    from rich.console import Console

    from peagle_vllm.doctor import as_dict, decide_runner, read_environment, show
    from peagle_vllm.seams import fingerprint
    from peagle_vllm.seams.version import NotVllmError, find_vllm, read

    try:
        install = find_vllm() if vllm is None else read(vllm)
    except NotVllmError as error:
        _fail(str(error))
    report = None if install is None else fingerprint.check(install)
    environment = runner = None
    if vllm is None:
        environment = read_environment(install)
        runner = decide_runner(environment, report)
    if as_json:
        print(json.dumps(as_dict(report, environment, runner), indent=2))
    else:
        show(Console(), report, environment, runner)
    raise typer.Exit(0 if report is not None and report.ok else 1)


if __name__ == "__main__":
    app()
