"""``peagle-vllm plan``. Heavy imports stay inside the command."""

from pathlib import Path
from typing import Annotated, Any

import typer

from peagle_tools.bench.cli import DEFAULT
from peagle_tools.shared.terminal import check_extra, fail


def plan(
    results: Annotated[
        Path | None, typer.Argument(metavar="RESULTS", help="Folder of a sweep to learn costs and acceptance from.")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(metavar="SUITE.yaml", help="Measure the smallest K of each arm once, and use that.")
    ] = None,
    arm: Annotated[list[str] | None, typer.Option(help="Plan this arm; without it all that speculate.")] = None,
    fit_k: Annotated[
        list[int] | None, typer.Option(help="Fit cells of this depth only, and predict the others.")
    ] = None,
    k: Annotated[
        list[int] | None, typer.Option("--k", help="Depths to choose from; without it the measured ones.")
    ] = None,
    what_if: Annotated[
        str | None,
        typer.Option(help="Another acceptance profile: alpha=0.7, or 0.74,0.56,0.42 by position, or al:3=2.87,7=3.70."),
    ] = None,
    draft_cost: Annotated[
        float | None, typer.Option(min=0, help="Without RESULTS: a draft forward, in target steps.")
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="Plan up to this many requests in flight; without it the measured ones."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The recommendations as one JSON object, nothing else.")
    ] = False,
    published: Annotated[bool, typer.Option("--published", help="Try the planner on the published figures.")] = False,
) -> None:
    """Which depth K to run at which concurrency, and when not to speculate.

    With RESULTS also writes RESULTS/plan.html with the break-even surface.
    """
    check_extra()
    from rich.console import Console

    from peagle_tools.bench import BenchError
    from peagle_tools.plan import show
    from peagle_tools.plan.profile import parse

    console = Console(highlight=False, quiet=as_json)
    try:
        if as_json and results is None:
            fail("--json needs RESULTS: only measured arms have a config")
        if published:
            show.show_published(console)
            return
        profile = None if what_if is None else parse(what_if)
        if calibrate is not None:
            results = _calibrate(calibrate)
        if results is not None:
            _plan_results(console, results, arm or [], fit_k or [], k or [], profile, max_num_seqs, as_json)
        elif profile is None:
            fail("give RESULTS, --calibrate SUITE.yaml, --what-if PROFILE with --draft-cost, or --published")
        elif draft_cost is None:
            fail("--what-if without RESULTS needs --draft-cost: what a draft forward costs, in target steps")
        else:
            show.show_textbook(console, profile, draft_cost, k or range(1, 11))
    except BenchError as error:
        fail(str(error))


def _calibrate(suite_file: Path) -> Path:
    """A sweep of one repeat at each arm's smallest depth; goes on with an earlier one."""
    from peagle_tools.bench.cells import grid
    from peagle_tools.bench.suite import read_suite
    from peagle_tools.bench.sweep import Sweep

    suite = read_suite(suite_file)
    folder = DEFAULT / f"{suite.name}-calibration"
    cells = [cell for cell in grid(suite, repeats=1) if cell.k == min(suite.arms[cell.arm].depths)]
    Sweep(suite, suite_file.parent, folder, cells).run_whole()
    return folder


def _plan_results(
    console: Any,
    results: Path,
    arms: list[str],
    fit_k: list[int],
    depths: list[int],
    profile: Any,
    up_to: int | None,
    as_json: bool,
) -> None:
    import json
    from dataclasses import asdict

    from peagle_tools.bench import BenchError
    from peagle_tools.bench.cells import read_results, read_sweep
    from peagle_tools.bench.metrics import points
    from peagle_tools.bench.report import write_files
    from peagle_tools.plan import page, show
    from peagle_tools.plan.fit import fit, judge, outlook
    from peagle_tools.plan.recommend import recommend_all

    measured = points(read_results(results))
    pairs = list(dict.fromkeys((p.arm, p.dataset) for p in measured if p.k and p.arm in (arms or [p.arm])))
    if not pairs:
        named = ", ".join(dict.fromkeys(p.arm for p in measured)) or "none"
        raise BenchError(f"{results}: no cells of an arm to plan, one that speculates; arms with cells: {named}")
    fits, plans = [], []
    for arm, dataset in pairs:
        fitted = fit(measured, arm, dataset, fit_k)
        judged = judge(fitted, measured)
        show.show_fit(console, fitted, judged)
        choose_from = sorted(depths or {p.k for p in measured if p.arm == arm and p.k})
        plans.append((fitted, outlook(fitted, judged, choose_from, profile)))
        show.show_advice(console, plans[-1][1], up_to or fitted.known_to, fitted.known_to)
        console.print()
        fits.append((fitted, judged))
    found = recommend_all(plans, read_sweep(results).get("suite", {}), up_to)
    if as_json:
        answer = {"hypothetical": profile is not None, "recommendations": [asdict(one) for one in found]}
        print(json.dumps(answer, indent=1))
        return
    lines = [list(one.lines()) for one in found]
    if profile:
        lines.insert(0, ["Hypothetical: acceptance is the one given with --what-if, not the measured one."])
    for line in (line for group in lines for line in group):
        console.print(line, soft_wrap=True, markup=False)
    wanted = sorted(depths or {p.k for p in measured if p.k})
    last = up_to or max(fitted.known_to for fitted, _ in fits)
    html = page.html(f"Plan from {results.resolve().name}", lines, fits, wanted, last)
    write_files(results, {"plan.html": html})
    print(results / "plan.html")
