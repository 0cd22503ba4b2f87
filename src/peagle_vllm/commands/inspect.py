"""``peagle-vllm inspect``."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from peagle_vllm.commands.common import one_line_errors

if TYPE_CHECKING:
    from peagle_vllm.heads.head import Head, Problem
    from peagle_vllm.heads.target import Target


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

    from peagle_vllm.heads.config import is_whole
    from peagle_vllm.heads.head import Problem
    from peagle_vllm.heads.locate import find
    from peagle_vllm.heads.reader import read_head
    from peagle_vllm.heads.report import report
    from peagle_vllm.heads.table import show
    from peagle_vllm.heads.target import TargetFiles, mask_token_fault

    with one_line_errors():
        found = read_head(find(head, revision))
        files = TargetFiles(target) if target is not None else None
        model = files.target() if files is not None else None
        problems = _problems(found, model, headers_only)
        mask_id = found.mask_token_id
        token = files.token(mask_id) if files is not None and isinstance(mask_id, int) and is_whole(mask_id) else None
        if fault := mask_token_fault(token, found.config_file):
            problems.append(Problem(fault, "warning"))
        data = report(found, problems, model, token)
    if as_json:
        print(json.dumps(data, indent=2))
    else:
        show(Console(), data)
    raise typer.Exit(0 if data["fit"] else 1)


def _problems(head: "Head", target: "Target | None", headers_only: bool) -> "list[Problem]":
    from peagle_vllm.heads.checks import check_head
    from peagle_vllm.heads.head import Problem
    from peagle_vllm.heads.pair import check_pair
    from peagle_vllm.heads.values import check_values

    if target is None:
        problems = check_head(head)
    else:
        problems = check_pair(head, target, num_speculative_tokens=None, parallel_drafting=True)
    if not head.tensors:
        problems.append(Problem(f"no *.safetensors: {head.name}; pickled weights are never read, save them as such"))
    if not headers_only:
        problems += [Problem(line) for line in check_values(head)]
    return problems
