"""``peagle-vllm inspect``."""

import json
from typing import Annotated

import typer

from peagle_vllm.commands.common import one_line_errors


def inspect(
    head: Annotated[str, typer.Argument(metavar="HEAD", help="A head's folder, or its id on the hub.")],
    target: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Check the head against this model: a folder or a hub id.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(metavar="REV", help="The head's branch, tag or commit on the hub.")
    ] = None,
    headers_only: Annotated[
        bool, typer.Option("--headers-only", help="Do not look for NaN and Inf in all the weights.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; docs/heads.md documents its fields.")] = False,
) -> None:
    """What is this head, and can vLLM draft with it?

    Reads config.json and the safetensors files; of a head on the hub that is not on this machine, the headers alone.
    Never a pickle, never code.

    Exit status: 0 fit; 1 unfit, each reason one line; 2 unreadable, the reason on stderr.
    """
    from rich.console import Console

    from peagle_vllm.heads.check_weights import check_values
    from peagle_vllm.heads.checks import Problem, check_head, check_pair, check_presence
    from peagle_vllm.heads.files import find
    from peagle_vllm.heads.head import read_head
    from peagle_vllm.heads.report import report, show
    from peagle_vllm.heads.target import TargetFiles, mask_token_fault

    with one_line_errors():
        found = read_head(find(head, revision))
        files = TargetFiles(target) if target is not None else None
        model = files.target() if files else None
        token = files.token(found.mask_token_id) if files else None
        problems = check_pair(found, model) if model else check_head(found)
        problems += check_presence(found)
        problems += [] if headers_only else [Problem(line) for line in check_values(found)]
        if fault := mask_token_fault(token, found.config_file):
            problems.append(Problem(fault, "warning"))
        data = report(found, problems, model, token)
    if as_json:
        print(json.dumps(data, indent=2))
    else:
        show(Console(), data)
    raise typer.Exit(0 if data["fit"] else 1)
