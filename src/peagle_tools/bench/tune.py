"""``peagle-vllm tune``: a short sweep on the user's own prompts, and the config that follows from it."""

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peagle_tools.bench import init
from peagle_tools.bench.cli import DEFAULT
from peagle_tools.shared.terminal import HeadArgument, check_extra, fail

if TYPE_CHECKING:
    from peagle_tools.bench.metrics import Point
    from peagle_tools.bench.suite import Suite


def tune(
    target: init.TargetArgument,
    head: HeadArgument,
    prompts: init.PromptsOption = None,
    k: init.KOption = None,
    concurrency: init.ConcurrencyOption = None,
    serve: init.ServeOption = init.SERVE,
    max_tokens: init.TokensOption = init.MAX_TOKENS,
    results: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where results go; without it bench-results/tune-HEAD.")
    ] = None,
) -> None:
    """Which K to serve on your prompts, and what it gains: a short sweep, then the whole speculative config.

    `bench init` with the same options writes the suite that is measured, to be edited and run by `bench run`.

    Exit status: 0 measured; 1 the head does not fit; 2 unusable input, or a cell failed.
    """
    check_extra("vllm", *(["datasets"] if prompts is None else []))
    from peagle_tools.bench import BenchError
    from peagle_tools.bench.cells import grid, read_results
    from peagle_tools.bench.metrics import points
    from peagle_tools.bench.sweep import Sweep

    if concurrency and len(set(concurrency)) < 2:
        fail("--concurrency: give two or more, for one does not show what a larger batch costs")
    folder = results or DEFAULT / f"tune-{init.name_of(head)}"
    files = init.suite_files(folder / "suite.yaml", target, head, prompts, k, concurrency, serve, max_tokens)
    try:
        if any(path.exists() and path.read_text() != text for path, text in files.items()):
            fail(f"{folder} holds results of other prompts or options; name another folder with --results")
        suite = init.write_suite(files)
        cells = grid(suite)
        starts = len({cell.server_id for cell in cells})
        print(f"tune: {init.data_used(suite, prompts)}")
        print(f"{len(cells)} cells over {starts} server starts; results go to {folder}")
        Sweep(suite, folder, folder, cells).run_whole()
        for line in answer(points(read_results(folder)), suite, head):
            print(line)
    except BenchError as error:
        fail(str(error))


def answer(measured: "Sequence[Point]", suite: "Suite", head: str) -> Iterator[str]:
    """Lines: the gain at each measured concurrency with its range over repeats, then the config to paste."""
    from peagle_tools.bench.verdict import sure, warnings
    from peagle_tools.plan.fit import fit, judge, outlook
    from peagle_tools.plan.recommend import recommend

    fitted = fit(measured, init.ARM, init.DATASET)
    seen = outlook(fitted, judge(fitted, measured), fitted.depths, None)
    found = recommend(init.DATASET, [(fitted, seen)], suite.model_dump(mode="json"), None)
    yield ""
    for choice in (row.choice for row in found.rows):
        rates = {p.k: p.tokens_per_second for p in measured if p.concurrency == choice.requests}
        depth = choice.k or max(fitted.depths, key=lambda k: rates[k].median)
        ratio = rates[depth].over(rates[0])
        gain = f"{ratio.median:.2f} x no speculation ({sure(ratio)})"
        if choice.k:
            yield f"c={choice.requests}: K={depth}, {rates[depth].median:.0f} tokens/s; expect {gain}"
        else:
            yield f"c={choice.requests}: no speculation; K={depth}, the fastest depth, gave {gain}"
    yield f"Depths within {found.error:.0%}, the error, count as equal: the smallest of them is taken."
    yield from (f"Warning: {line}" for line in warnings(init.DATASET, measured))
    if not found.config:
        if any(row.choice.close for row in found.rows):
            yield "What speculation gains is within the error: measure again on an idle machine, into other --results."
        yield "No depth is faster beyond the error: leave --speculative-config out."
        return
    last = found.schedule[-1][2]
    yield f"Measured on these prompts and this machine; beyond c={found.known_to} vLLM goes on with the last K, {last}."
    yield f"--speculative-config {shlex.quote(json.dumps(found.config | {'model': head}))}"
