"""``peagle-vllm bench run | report | compare``. Heavy imports stay inside the commands."""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

app = typer.Typer(
    name="bench",
    help="Measure drafters, depths and concurrencies; report; compare.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
DEFAULT = Path("bench-results")


def fail(message: str) -> NoReturn:
    """Every line of ``message`` on stderr, and exit status 2."""
    for line in message.splitlines():
        print(f"peagle-vllm: {line}", file=sys.stderr)
    raise typer.Exit(2)


def check_extra() -> None:
    """Exit with the name of a package that is missing; where vLLM is installed too, most of them are there."""
    for name in ("pydantic", "yaml", "psutil", "matplotlib"):
        if importlib.util.find_spec(name) is None:
            fail(f'{"pyyaml" if name == "yaml" else name} is not installed: pip install "peagle-vllm[bench]"')


def latest_results() -> Path:
    """The sweep under ``bench-results`` that was written to last."""
    found = sorted(DEFAULT.glob("*/cells"), key=lambda folder: folder.stat().st_mtime)
    if not found:
        fail(f"no sweep in ./{DEFAULT}; name the folder of results")
    return found[-1].parent


@app.command()
def run(
    suite: Annotated[Path, typer.Argument(metavar="SUITE.yaml", help="What to measure: benchmarks/suites/.")],
    results: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where results go; without it bench-results/NAME.")
    ] = None,
    arm: Annotated[list[str] | None, typer.Option(help="Only this arm; may be given often.")] = None,
    k: Annotated[list[int] | None, typer.Option("--k", help="Only this depth; arms without speculation stay.")] = None,
    concurrency: Annotated[list[int] | None, typer.Option(help="Only this concurrency.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Instead of the suite's.")] = None,
) -> None:
    """Run a sweep, or go on with one. Every cell is one `vllm bench serve` against a server started for it.

    Exit status: 0 all cells are there; 1 some failed, the others are there; 2 the sweep cannot run; 130 interrupted.
    """
    check_extra()
    from peagle_vllm.bench import BenchError
    from peagle_vllm.bench.cells import grid
    from peagle_vllm.bench.suite import read_suite
    from peagle_vllm.bench.sweep import Sweep

    try:
        read = read_suite(suite)
        if unknown := [name for name in arm or [] if name not in read.arms]:
            fail(f"{suite} has no arm {unknown[0]!r}; it has {', '.join(read.arms)}")
        cells = grid(read, arms=arm or [], k=k or [], concurrency=concurrency or [], repeats=repeats)
        folder = results or DEFAULT / read.name
        print(f"{read.name}: results go to {folder}")
        failed = Sweep(read, suite.parent, folder, cells).run()
    except BenchError as error:
        fail(str(error))
    except KeyboardInterrupt:
        print("\npeagle-vllm: interrupted; the same command goes on where it stopped", file=sys.stderr)
        raise typer.Exit(130) from None
    raise typer.Exit(1 if failed else 0)


@app.command()
def report(
    results: Annotated[
        Path | None, typer.Argument(metavar="RESULTS", help="Folder of a sweep; the last one in bench-results.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where to; without it RESULTS.")] = None,
) -> None:
    """Write report.md and report.html: tables, plots, best K, and the published figures beside the measured ones."""
    check_extra()
    from rich.console import Console
    from rich.markdown import Markdown

    from peagle_vllm.bench import BenchError
    from peagle_vllm.bench.report import write_report

    folder = results or latest_results()
    try:
        summary = write_report(folder, out := out or folder)
    except BenchError as error:
        fail(str(error))
    Console().print(Markdown(summary))
    print(f"{out / 'report.md'}\n{out / 'report.html'}")


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="Results before.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Results after.")],
    tolerance: Annotated[
        float, typer.Option(min=0, max=1, help="A loss of throughput up to this share never counts.")
    ] = 0.05,
    other_hardware: Annotated[bool, typer.Option(help="Compare although the hardware differs.")] = False,
) -> None:
    """Which cells of B are slower than in A, beyond noise?

    Exit status: 0 none; 1 some are slower, failed or missing; 2 the two cannot be compared.
    """
    check_extra()
    from rich.console import Console

    from peagle_vllm.bench import BenchError
    from peagle_vllm.bench.cells import read_results
    from peagle_vllm.bench.compare import compare as compare_results

    try:
        found = compare_results(
            read_results(before), read_results(after), tolerance=tolerance, other_hardware=other_hardware
        )
    except BenchError as error:
        fail(str(error))
    Console().print(found.table())
    for line in found.lines():
        print(line)
    raise typer.Exit(1 if found.worse else 0)
