"""``peagle-vllm bench run | report | compare``. Heavy imports stay inside the commands."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from peagle_tools.shared.terminal import check_extra, exit_on_sigterm, fail, one_line_errors

app = typer.Typer(help="Measure drafters, depths and concurrencies; report; compare.", no_args_is_help=True)
DEFAULT = Path("bench-results")


@contextmanager
def sweeping() -> Iterator[None]:
    """An error ends the command with its line, and so does Ctrl-C, for the same command continues."""
    exit_on_sigterm()
    try:
        with one_line_errors():
            yield
    except KeyboardInterrupt:
        fail("interrupted; the same command continues where it stopped", 130)


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
    """Run a sweep, or continue one. Every cell is one `vllm bench serve` against a server of its arm, K and repeat.

    Exit status: 0 all cells are there; 1 some failed; 2 the sweep cannot run; 130 interrupted.
    """
    check_extra("vllm")
    from peagle_tools.bench.cells import grid
    from peagle_tools.bench.suite import Suite
    from peagle_tools.bench.sweep import Sweep
    from peagle_tools.shared.checked_yaml import read_yaml

    with sweeping():
        plan = read_yaml(suite, Suite, "suite")
        if unknown := [name for name in arm or [] if name not in plan.arms]:
            fail(f"{suite} has no arm {unknown[0]!r}; it has {', '.join(plan.arms)}")
        depths = {0, *(depth for name in arm or plan.arms for depth in plan.arms[name].k)}
        if missing := set(k or ()) - depths:
            fail(f"{suite} has no such arm with K={min(missing)}; it has {sorted(depths)}")
        if unmeasured := set(concurrency or ()) - {*plan.concurrency}:
            fail(f"{suite} has no concurrency {min(unmeasured)}; it has {plan.concurrency}")
        if any(dataset.hub for dataset in plan.datasets.values()):
            check_extra("datasets")  # else every cell would fail
        cells = grid(plan, arms=arm or [], k=k or [], concurrency=concurrency or [], repeats=repeats)
        folder = results or DEFAULT / plan.name
        print(f"{plan.name}: results go to {folder}")
        failed = Sweep(plan, suite.parent, folder, cells).run()
    raise typer.Exit(1 if failed else 0)


@app.command()
def report(results: Annotated[Path, typer.Argument(metavar="RESULTS", help="Folder of a sweep.")]) -> None:
    """Write RESULTS/report.md: ratios with their noise, every cell, the best K."""
    check_extra()
    with one_line_errors():
        show_report(results)


def show_report(results: Path) -> None:
    """Write report.md, and print its tables of the best K and the advice."""
    from rich.console import Console
    from rich.markdown import Markdown

    from peagle_tools.bench.report import write_report

    summary, advice = write_report(results)
    Console().print(Markdown(summary))
    print("", results / "report.md", "\nWhich K to serve:", *advice, sep="\n")


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="Results before.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Results after.")],
    tolerance: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="A loss of throughput or TPOT up to this share never counts; TTFT: twice, p99: 4 times."
        ),
    ] = 0.05,
) -> None:
    """Which cells of B are worse than in A, beyond noise: throughput, TTFT, TPOT, AL, and the text in float32?

    Exit status: 0 none; 1 some are worse, failed or missing; 2 the two cannot be compared.
    """
    check_extra()
    from rich.console import Console

    from peagle_tools.bench import compare as comparing
    from peagle_tools.bench.cells import read_results

    with one_line_errors():
        changes = comparing.compare(read_results(before), read_results(after), tolerance)
    comparing.show(Console(), changes)
    raise typer.Exit(1 if any(change.worse for change in changes) else 0)
