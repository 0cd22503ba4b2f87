"""``peagle-vllm convert``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from peagle_tools.shared import terminal
from peagle_tools.shared.atomic_files import new_folder


def convert(
    head: terminal.HeadArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make; it must not exist yet.")],
    to: Annotated[Literal["vllm", "speculators"], typer.Option(help="vLLM's own format, or speculators'.")] = "vllm",
    mask_token_id: Annotated[
        int | None, typer.Option(metavar="N", help="The mask token, where the head does not name it.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Check HEAD against this; --to speculators names it in OUT.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, metavar="W", help="Let every layer see W tokens only: for long prompts.")
    ] = None,
    draft_vocab: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Draft only the N tokens that --text holds most.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="For --draft-vocab: prompts, best with the target's answers.")
    ] = None,
    revision: terminal.RevisionOption = None,
) -> None:
    """Write a head of any dialect in a format that vLLM loads by itself.

    Weights are copied byte by byte, without the rows that --draft-vocab leaves out. OUT appears whole or not at all.

    Exit status: 0 written; 1 the head is unfit, each reason one line on stderr; 2 something cannot be read or written.
    """
    from peagle_tools.convert.draft_vocab import choose
    from peagle_tools.shared.prompt_files import read_conversations
    from peagle_vllm.heads import convert as converting
    from peagle_vllm.heads.files import download
    from peagle_vllm.heads.head import read_head
    from peagle_vllm.heads.target import read_target

    terminal.exit_on_sigterm()
    if (draft_vocab is None) != (text is None) or (text and target is None):
        terminal.fail("--draft-vocab N, --text FILE and --target TARGET go together")
    with terminal.one_line_errors("cuda"):
        source = read_head(download(head, revision))
        if mask_token_id is not None:
            source = replace(source, mask_token_id=mask_token_id, mask_token_key="--mask-token-id")
        if window is not None:  # of every layer: tokens that each one sees, itself included
            sliding = {"layer_types": ["sliding_attention"] * source.num_layers, "sliding_window": window}
            source = replace(source, served={**source.served, **sliding, "use_sliding_window": True})
        model = read_target(target) if target is not None else None
        terminal.exit_if_unfit(converting.obstacles(source, to, model))
        kept, coverage = None, 0.0
        if draft_vocab is not None and text and target:
            kept, coverage = choose(source, target, draft_vocab, read_conversations(text))
        with new_folder(out) as folder:
            converting.convert(source, folder, to, model, kept)
        written = read_head(out)
    print(f"wrote {out}: {to} format, {len(written.tensors)} tensors")
    if kept is not None:
        print(f"{draft_vocab:,} of {source.draft_vocab_size:,} draft tokens: {coverage:.1%} of held-out text")
