"""``peagle-vllm inspect``."""

import json
from typing import Annotated

import typer

from peagle_tools.shared.terminal import HeadArgument, JsonOption, RevisionOption, one_line_errors


def inspect(
    head: HeadArgument,
    target: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Check the head against this model: a folder or a hub id.")
    ] = None,
    revision: RevisionOption = None,
    as_json: JsonOption = False,
) -> None:
    """What is this head, and can vLLM draft with it?

    Reads config.json and the safetensors files; of a head on the hub that is not on this machine, the headers alone.
    Never a pickle, never code.

    Exit status: 0 fit; 1 unfit, each reason one line; 2 unreadable, the reason on stderr.
    """
    from rich.console import Console

    from peagle_tools.inspect.head_report import report, show
    from peagle_vllm.heads.checks import check
    from peagle_vllm.heads.files import find
    from peagle_vllm.heads.head import read_head
    from peagle_vllm.heads.target import find_token, read_target, read_tokens

    with one_line_errors():
        source = read_head(find(head, revision))
        model = read_target(target) if target is not None else None
        token = find_token(read_tokens(target), source.mask_token_id) if target is not None else None
        problems = check(source, model, token)
        data = report(source, problems, model, token)
    if as_json:
        print(json.dumps(data, indent=2))
    else:
        show(Console(), data)
    raise typer.Exit(0 if data["fit"] else 1)
