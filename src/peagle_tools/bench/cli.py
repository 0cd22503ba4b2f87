"""``peagle-vllm bench run | report | compare``. Heavy imports stay inside the commands."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from peagle_tools.shared.terminal import check_extra, fail

app = typer.Typer(
    name="bench",
    help="Measure drafters, depths and concurrencies; report; compare.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
DEFAULT = Path("bench-results")


def latest_results() -> Path:
    """The sweep under ``bench-results`` that was written to last."""
    found = sorted(DEFAULT.glob("*/cells"), key=lambda folder: folder.stat().st_mtime)
    if not found:
        fail(f"no sweep in ./{DEFAULT}; name the folder of results")
    return found[-1].parent


@app.command()
def run(
    file: Annotated[
        Path | None, typer.Argument(metavar="[SUITE.yaml]", help="What to measure: benchmarks/suites/.")
    ] = None,
    suite: Annotated[str | None, typer.Option(metavar="NAME", help="A suite that this package brings along.")] = None,
    results: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where results go; without it bench-results/NAME.")
    ] = None,
    arm: Annotated[list[str] | None, typer.Option(help="Only this arm; may be given often.")] = None,
    k: Annotated[list[int] | None, typer.Option("--k", help="Only this depth; arms without speculation stay.")] = None,
    concurrency: Annotated[list[int] | None, typer.Option(help="Only this concurrency.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Instead of the suite's.")] = None,
    expect: Annotated[
        str | None,
        typer.Option(metavar="published", help="Fail unless each AL of P-EAGLE is the published one, within 5%."),
    ] = None,
) -> None:
    """Run a sweep, or go on with one. Every cell is one `vllm bench serve` against a server started for it.

    Exit status: 0 all cells are there; 1 some failed, or are not as expected; 2 the sweep cannot run; 130 interrupted.
    """
    check_extra("vllm")
    from peagle_tools.bench import BenchError
    from peagle_tools.bench.cells import grid, read_results
    from peagle_tools.bench.metrics import points
    from peagle_tools.bench.published import expected
    from peagle_tools.bench.suite import read_suite
    from peagle_tools.bench.sweep import Sweep

    shipped = {found.stem: found for found in Path(__file__).with_name("suites").glob("*.yaml")}
    if (file is None) == (suite is None):
        fail(f"give SUITE.yaml or --suite NAME, one of them; names: {', '.join(shipped)}")
    if expect not in (None, "published"):
        fail(f"--expect {expect}: only 'published' can be expected")
    if suite and suite not in shipped:
        fail(f"--suite {suite}: there is none of this name; names: {', '.join(shipped)}")
    file = shipped[suite] if suite else file
    assert file is not None
    try:
        read = read_suite(file)
        if unknown := [name for name in arm or [] if name not in read.arms]:
            fail(f"{file} has no arm {unknown[0]!r}; it has {', '.join(read.arms)}")
        if any(dataset.hub for dataset in read.datasets.values()):
            check_extra("datasets")  # else every cell would fail
        if expect and not expected(read.target, list(read.datasets), []):
            fail(f"--expect published: no AL of {read.target} was published on {', '.join(read.datasets)}")
        cells = grid(read, arms=arm or [], k=k or [], concurrency=concurrency or [], repeats=repeats)
        folder = results or DEFAULT / read.name
        print(f"{read.name}: results go to {folder}")
        failed = Sweep(read, file.parent, folder, cells).run()
        checks = expected(read.target, list(read.datasets), points(read_results(folder))) if expect else []
    except BenchError as error:
        fail(str(error))
    except KeyboardInterrupt:
        print("\npeagle-vllm: interrupted; the same command goes on where it stopped", file=sys.stderr)
        raise typer.Exit(130) from None
    for check in checks:
        print(check.text)
    if missed := sum(not check.passed for check in checks):
        print(f"FAIL: {missed} of {len(checks)} are not as published")
    elif checks:
        print(f"PASS: all {len(checks)} are as published")
    raise typer.Exit(1 if failed or missed else 0)


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

    from peagle_tools.bench import BenchError
    from peagle_tools.bench.report import write_report

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
        float,
        typer.Option(min=0, max=1, help="A loss of throughput or TPOT up to this share never counts (TTFT: twice)."),
    ] = 0.05,
    al_tolerance: Annotated[float, typer.Option(min=0, max=1, help="The same for AL.")] = 0.03,
    other_hardware: Annotated[bool, typer.Option(help="Compare although the hardware differs.")] = False,
) -> None:
    """Which cells of B are worse than in A, beyond noise: throughput, TTFT, TPOT, AL, and the text in float32?

    Exit status: 0 none; 1 some are worse, failed or missing; 2 the two cannot be compared.
    """
    check_extra()
    from rich.console import Console

    from peagle_tools.bench import BenchError
    from peagle_tools.bench.cells import read_results
    from peagle_tools.bench.compare import compare as compare_results

    try:
        found = compare_results(
            read_results(before),
            read_results(after),
            tolerance=tolerance,
            al_tolerance=al_tolerance,
            other_hardware=other_hardware,
        )
    except BenchError as error:
        fail(str(error))
    Console().print(found.table())
    for line in found.lines():
        print(line)
    raise typer.Exit(1 if found.worse else 0)
