"""``peagle-vllm sharpen``."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from peagle_tools.shared import terminal


def sharpen(
    head: Annotated[str, typer.Argument(metavar="HEAD", help="A P-EAGLE head's folder, or its id on the hub.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make; it must not exist yet.")],
    target: Annotated[str, typer.Option(metavar="TARGET", help="The model that the head drafts for.")],
    prompts: Annotated[Path, typer.Option(metavar="FILE", help="Prompts: text or JSON lines, docs/bench.md.")],
    held_out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts to measure with; default: a fifth, at most 64.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option("-k", metavar="K", min=1, help="Tokens to draft; default: the trained depth.")
    ] = None,
    rank: Annotated[int, typer.Option(metavar="R", min=1, max=1024, help="Columns of the selector's tables.")] = 64,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=8, help="The longest answer, in tokens.")] = 160,
    engine: terminal.EngineOption = "{}",
) -> None:
    """Fit a selector to a head, so that its K tokens know of each other. HEAD itself stays as it is.

    The target answers the prompts while the head drafts, the selector is fitted to what the head proposed and the
    target said, and both heads are measured on prompts that were kept aside.

    Exit status: 0 written; 1 not better, nothing written; 2 something cannot be read or run.
    """
    arguments = terminal.json_object(engine)
    terminal.exit_on_sigterm()
    with terminal.one_line_errors("cuda"):
        from peagle_tools.shared.prompt_files import read_prompts
        from peagle_tools.shared.prompts import read_tokenizer, templated
        from peagle_tools.sharpen import sharpening
        from peagle_vllm.heads.checks import check
        from peagle_vllm.heads.files import download
        from peagle_vllm.heads.head import read_head
        from peagle_vllm.heads.target import read_target

        aside = read_prompts(held_out) if held_out else None
        learn, aside = sharpening.split(read_prompts(prompts), aside)
        model, source = read_target(target), read_head(download(head))
        terminal.exit_if_unfit(check(source, model))
        depth = num_speculative_tokens or source.trained_depth or 5
        tokenizer = read_tokenizer(target, trust_remote_code=arguments.get("trust_remote_code", False))
        ids = partial(templated, tokenizer, tokenize=True)
        job = sharpening.Job(model, [*map(ids, learn)], [*map(ids, aside)], depth, rank, max_tokens, arguments)
        try:
            print(sharpening.sharpen(source, job, out), f"wrote {out}", sep="\n")
        except sharpening.NoGain as error:
            print(error)
            terminal.fail(f"no better than {head} on held-out prompts: nothing is written; give more prompts", 1)
