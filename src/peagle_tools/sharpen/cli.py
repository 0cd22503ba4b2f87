"""``peagle-vllm sharpen``."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from peagle_tools.shared.terminal import JsonOption, exit_if_unfit, json_object, one_line_errors


def sharpen(
    head: Annotated[str, typer.Argument(metavar="HEAD", help="A P-EAGLE head's folder, or its id on the hub.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make; it must not exist yet.")],
    target: Annotated[str, typer.Option(metavar="TARGET", help="The model that the head drafts for.")],
    prompts: Annotated[Path, typer.Option(metavar="FILE", help="Prompts: text, JSON lines or a table, docs/bench.md.")],
    held_out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts to measure with; default: a fifth, at most 64.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option("-k", metavar="K", min=1, help="The largest K; default: the trained depth.")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(metavar="R", min=1, max=1024, help="Columns of the selector's tables; default: HEAD's, or 64."),
    ] = None,
    candidates: Annotated[
        int | None, typer.Option(metavar="M", min=2, max=64, help="Candidates a position; default: HEAD's, or 16.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=8, help="The longest answer, in tokens.")] = 160,
    engine: Annotated[
        str, typer.Option(metavar="JSON", help='More arguments for vLLM\'s LLM, such as {"tensor_parallel_size": 2}.')
    ] = "{}",
    as_json: JsonOption = False,
) -> None:
    """Fit a selector to a head, so that its K tokens know of each other. HEAD itself stays as it is.

    The target answers the prompts while the head drafts, the selector is fitted to what the head proposed and the
    target said, and both heads are measured on prompts that were kept aside. The same command continues a stopped one.

    Exit status: 0 written; 1 not better, nothing written; 2 something cannot be read or run.
    """
    from rich.console import Console
    from rich.progress import Progress

    from peagle_tools.shared.prompt_files import read_prompts
    from peagle_tools.sharpen import sharpening
    from peagle_tools.sharpen.split_prompts import Prompts, divided, read_tokens
    from peagle_vllm.heads.checks import check
    from peagle_vllm.heads.files import download
    from peagle_vllm.heads.head import read_head
    from peagle_vllm.heads.selector import read_selector_config
    from peagle_vllm.heads.target import read_target

    arguments = json_object(engine)
    console = Console(stderr=True)
    with one_line_errors(), Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        texts = read_prompts(prompts, target)
        aside = read_prompts(held_out, target) if held_out else None
        model, found = read_target(target), read_head(download(head))
        exit_if_unfit(check(found, model))
        depth = num_speculative_tokens or found.trained_depth or 5
        own = read_selector_config(found.config, found.config_file)
        sizes = (rank or (own.selector_rank if own else 64), candidates or (own.selector_top_k if own else 16))
        plan = sharpening.Plan(depth, *sizes, max_tokens, arguments)
        bar = bars.add_task("")

        def progress(what: str, done: int, of: int) -> None:
            bars.update(bar, description=what, completed=done, total=of)

        asked_of = Prompts(*(read_tokens(target, part) for part in divided(texts, aside)))
        report = sharpening.sharpen(found, sharpening.Job(model, asked_of, plan, progress), out)
    if as_json:
        print(json.dumps(sharpening.as_dict(report, plan), indent=2))
    else:
        Console().print(*report.tables())
        if report.is_better:
            print(f"wrote {out}")
    if not report.is_better:
        print(f"no better than {head} on held-out prompts: nothing is written; give more prompts", file=sys.stderr)
        raise typer.Exit(1)
