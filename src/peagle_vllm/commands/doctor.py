"""``peagle-vllm doctor``."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from peagle_vllm.commands.common import fail


def doctor(
    vllm: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Check this vLLM wheel, or unpacked one, instead of the installed vLLM."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Would P-EAGLE be served here, by which runner, and do the seams with vLLM hold?

    Exit status: 0 all well; 1 a seam has moved, or vLLM is absent; 2 PATH is no vLLM, or PEAGLE_VLLM_ACCEPT no seam.
    """
    from rich.console import Console

    from peagle_vllm.doctor import as_dict, decide_runner, read_environment, show
    from peagle_vllm.seams import fingerprint
    from peagle_vllm.seams.version import NotVllmError, find_vllm, read

    try:
        install = find_vllm() if vllm is None else read(vllm)
        accepted = fingerprint.accepted_seams(os.environ.get(fingerprint.ACCEPT))
    except (NotVllmError, fingerprint.AcceptError) as error:
        fail(str(error))
    report = None if install is None else fingerprint.check(install, accepted=accepted)
    environment = runner = None
    if vllm is None:
        environment = read_environment(install)
        runner = decide_runner(environment, report)
    if as_json:
        print(json.dumps(as_dict(report, environment, runner), indent=2))
    else:
        show(Console(), report, environment, runner)
    raise typer.Exit(0 if report is not None and report.ok else 1)
