"""``peagle-vllm sharpen``."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle_vllm.commands.common import JsonOption, conversations, exit_if_unfit, json_object, one_line_errors

if TYPE_CHECKING:
    from peagle_vllm.sharpen.run import Report


def sharpen(
    head: Annotated[str, typer.Argument(metavar="HEAD", help="A P-EAGLE head's folder, or its id on the hub.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make; it must not exist yet.")],
    target: Annotated[str, typer.Option(metavar="TARGET", help="The model that the head drafts for.")],
    prompts: Annotated[
        Path, typer.Option(metavar="FILE", help='One a line: text, or JSON with "prompt" or "messages".')
    ],
    held_out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts to measure with; default: 64 kept aside of FILE.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option("-k", metavar="K", min=1, help="The largest K; default: the trained depth.")
    ] = None,
    rank: Annotated[int, typer.Option(metavar="R", min=1, max=1024, help="Columns of the edge's tables.")] = 64,
    candidates: Annotated[int, typer.Option(metavar="M", min=2, max=64, help="Candidates a position.")] = 16,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=8, help="The longest answer, in tokens.")] = 160,
    engine: Annotated[
        str, typer.Option(metavar="JSON", help='More arguments for vLLM\'s LLM, such as {"tensor_parallel_size": 2}.')
    ] = "{}",
    as_json: JsonOption = False,
) -> None:
    """Fit an edge to a head, so that its K tokens know of each other. The head itself stays as it is.

    The target answers the prompts while the head drafts, the edge is fitted to what the head proposed and the target
    said, and both heads are measured on prompts that were kept aside. Stopped at any point, it goes on from there.

    Exit status: 0 written; 1 not better, nothing written; 2 something cannot be read or run.
    """
    from rich.console import Console
    from rich.progress import Progress

    from peagle_vllm.heads.checks import check
    from peagle_vllm.heads.files import download
    from peagle_vllm.heads.head import read_head
    from peagle_vllm.heads.target import read_target
    from peagle_vllm.sharpen import run

    arguments = json_object(engine)
    learn, aside = run.divided(conversations(prompts), conversations(held_out) if held_out else None)
    console = Console(stderr=True)
    with one_line_errors(), Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        model, found = read_target(target), read_head(download(head))
        exit_if_unfit(check(found, model))
        depth = num_speculative_tokens or found.trained_depth or 5
        plan = run.Plan(depth, rank, candidates, max_tokens, arguments)
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=of)
            bars.update(tasks[what], completed=done)

        learn_ids, aside_ids = run.token_ids(target, learn), run.token_ids(target, aside)
        report = run.sharpen(found, target, model.vocab_size, learn_ids, aside_ids, out, plan, progress)
    if as_json:
        print(json.dumps(run.as_dict(report, plan), indent=2))
    else:
        show(report, out)
    if not report.is_better:
        print(f"no better than {head} on held-out prompts: nothing is written; give more prompts", file=sys.stderr)
        raise typer.Exit(1)


def show(report: "Report", out: Path) -> None:
    """The two tables that a reader needs: forms on the development share, and AL as served."""
    from rich.console import Console
    from rich.table import Table

    forms = Table("form", "AL on the development share", title=f"{report.drafts:,} drafts recorded")
    for name, gain in report.forms.items():
        forms.add_row(f"{name} (chosen)" if name == report.chosen else name, f"{gain.length:.3f} ± {gain.error:.3f}")
    served = Table("K", "AL before", "AL after", "gain", "estimated offline", title="served, held-out prompts")
    for one in report.served:
        plain, edged = report.offline[one.num_speculative_tokens]
        served.add_row(
            str(one.num_speculative_tokens),
            f"{one.before.length:.3f} ± {one.before.error:.3f}",
            f"{one.after.length:.3f} ± {one.after.error:.3f}",
            f"{one.after.length / one.before.length - 1:+.1%}",
            f"{edged.length / plain.length - 1:+.1%}",
        )
    console = Console()
    console.print(forms, served)
    if report.is_better:
        console.print(f"wrote {out}")
