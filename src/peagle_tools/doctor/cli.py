"""``peagle-vllm doctor``."""

from pathlib import Path
from typing import Annotated

import typer

from peagle_tools.shared.terminal import fail


def doctor(
    vllm: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Check this vLLM wheel, or unpacked one, instead of the installed vLLM."),
    ] = None,
) -> None:
    """Does vLLM load the plugin here, and does each patch fit this vLLM?

    Exit status: 0 all well; 1 a patch does not fit, vLLM is absent or does not load the plugin; 2 PATH holds no vLLM,
    or PEAGLE_VLLM_ACCEPT names no patch.
    """
    from rich.console import Console

    from peagle_tools.doctor.compatibility_report import LOADED, plugin_state, show
    from peagle_vllm.patches import fingerprint
    from peagle_vllm.patches.version import find_vllm, read

    try:
        install = find_vllm() if vllm is None else read(vllm)
        accepted = fingerprint.accepted_patches()
    except ValueError as error:
        fail(str(error))
    report = None if install is None else fingerprint.check(install, accepted=accepted)
    show(Console(), report, with_environment=vllm is None)
    raise typer.Exit(report is None or bool(report.changed) or (vllm is None and plugin_state() != LOADED))
