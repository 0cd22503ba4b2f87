"""``peagle-vllm doctor``."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from peagle_tools.shared.terminal import JsonOption, fail, one_line_errors


def doctor(
    vllm: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Check this vLLM wheel, or unpacked one, instead of the installed vLLM."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="With --speculative-config: what drafting takes of a GPU's memory.")
    ] = None,
    speculative_config: Annotated[str | None, typer.Option(metavar="JSON", help="As `vllm serve` takes it.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="As `vllm serve` takes it, like the next two.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option()] = None,
    max_cudagraph_capture_size: Annotated[int | None, typer.Option()] = None,
    as_json: JsonOption = False,
) -> None:
    """Would P-EAGLE be served here, by which runner, and does each patch fit this vLLM?

    Exit status: 0 all well; 1 a patch does not fit, or vLLM is absent; 2 PATH holds no vLLM, or PEAGLE_VLLM_ACCEPT
    names no patch.
    """
    from rich.console import Console

    from peagle_tools.doctor.report import as_dict, read_environment, show
    from peagle_vllm.patches import fingerprint
    from peagle_vllm.patches.version import NotVllmError, find_vllm, read

    try:
        install = find_vllm() if vllm is None else read(vllm)
        accepted = fingerprint.accepted_patches(os.environ.get(fingerprint.ACCEPT))
    except (NotVllmError, fingerprint.AcceptError) as error:
        fail(str(error))
    report = None if install is None else fingerprint.check(install, accepted=accepted)
    environment = read_environment(install) if vllm is None else None
    drafts = None
    if speculative_config is not None or target is not None:
        if speculative_config is None or target is None or vllm is not None:
            fail("--target and --speculative-config go together, without --vllm; give both, or neither")
        from peagle_tools.doctor.memory import drafting, lines

        flags = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_cudagraph_capture_size": max_cudagraph_capture_size,
        }
        with one_line_errors():
            drafts = drafting(target, speculative_config, flags)
    if as_json:
        more = {} if drafts is None else {"drafting": drafts}
        print(json.dumps(as_dict(report, environment) | more, indent=2))
    else:
        show(Console(), report, environment)
        for name, value in lines(drafts) if drafts else ():
            print(f"{name:13} {value}")
    raise typer.Exit(0 if report is not None and report.ok else 1)
