"""``peagle-vllm doctor``: would P-EAGLE be served here, by which runner, and does each patch fit this vLLM?

Imports no vLLM, because the report is wanted above all where vLLM is broken or unknown.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from peagle_tools.shared.provenance import versions
from peagle_vllm import __version__
from peagle_vllm.patches.fingerprint import ACCEPT, Report
from peagle_vllm.patches.version import VllmInstall

VARIABLES = ("PEAGLE_VLLM_DISABLE", "VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER", ACCEPT)
DISABLE, PLUGINS, USE_V2, *_ = VARIABLES
PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME = "peagle"


@dataclass(frozen=True)
class Environment:
    """Everything outside vLLM's source that decides what P-EAGLE gets."""

    torch: str | None
    triton: str | None
    device: str | None  # the accelerator's name, or CPU where vLLM is built for that; None: there is none
    no_triton: str  # why Model Runner V2 cannot use Triton here; empty: it can
    registered: bool  # the plugin is an installed entry point
    platform: str | None  # the class of a platform plugin that is active; None: one of vLLM's own platforms
    variables: Mapping[str, str]  # those of VARIABLES that are set

    @property
    def absent(self) -> str:
        """Why vLLM does not load the plugin; empty: it does."""
        if not self.registered:
            return "not installed as an entry point: pip install peagle-vllm"
        if not _is_let_in(PLUGIN_NAME, self.variables):
            return f"left out by {PLUGINS}={self.variables[PLUGINS]}"
        return f"switched off by {DISABLE}=1" if self.variables.get(DISABLE) == "1" else ""


def _is_let_in(plugin: str, variables: Mapping[str, str]) -> bool:
    """Whether VLLM_PLUGINS admits a plugin. vLLM splits at commas and strips nothing."""
    return PLUGINS not in variables or plugin in variables[PLUGINS].split(",")


class Runner(NamedTuple):
    """What a P-EAGLE configuration gets."""

    name: Literal["V2", "V1", "stock vLLM", "out-of-tree", "refused", "none"]
    why: str


def read_environment(install: VllmInstall | None) -> Environment:
    """Look at this process and machine. Imports torch, Triton's list of backends, and platform plugins."""
    cpu_build = install is not None and "cpu" in f"{install.distribution} {install.version}"
    device = "CPU" if cpu_build else _accelerator()
    packages = versions()
    return Environment(
        torch=packages.get("torch"),
        triton=packages.get("triton"),
        device=device,
        no_triton=_why_no_triton(cpu_build, device),
        registered=bool(importlib.metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME)),
        platform=_platform_plugin(),
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def decide_runner(environment: Environment, report: Report | None) -> Runner:
    """The runner that P-EAGLE gets, in the order in which the plugin and vLLM decide it."""
    if report is None:
        return Runner("none", 'vLLM is not installed: pip install "peagle-vllm[cuda]" or "peagle-vllm[cpu]"')
    use_v2 = environment.variables.get(USE_V2)
    forced = _forced(use_v2)
    if environment.absent:
        why = f"the plugin is {environment.absent}"
        if forced == "V2":
            return Runner("refused", f"{why}; {USE_V2} forces V2, where stock vLLM has no P-EAGLE")
        return Runner("stock vLLM", f"{why}; where V2 lacks P-EAGLE, vLLM falls back to V1")
    if environment.platform:
        return Runner("out-of-tree", f"{environment.platform} brings workers of its own, which the plugin leaves alone")
    if report.changed:
        return Runner("refused", report.differs(report.changed))
    if environment.device is None:
        return Runner("none", "no accelerator is visible, and this is not a CPU build of vLLM")
    if forced == "invalid":
        return Runner("none", f"{USE_V2}={use_v2} is not a number, so vLLM does not start")
    if forced == "V2" and environment.no_triton:
        return Runner("none", f"{USE_V2} forces V2, which needs Triton: {environment.no_triton}")
    if forced:
        return Runner(forced, f"{USE_V2}={use_v2} forces it")
    if environment.no_triton:
        return Runner("V1", f"V2 needs Triton: {environment.no_triton}")
    return Runner("V2", "vLLM's default, unless another setting of the server needs V1")


def _forced(use_v2: str | None) -> Literal["V2", "V1", "invalid"] | None:
    if use_v2 is None:
        return None
    try:
        return "V2" if int(use_v2) else "V1"
    except ValueError:
        return "invalid"


def _accelerator() -> str | None:
    try:
        import torch

        kind = torch.accelerator.current_accelerator(check_available=True)
        if kind is None:
            return None
        name = torch.get_device_module(kind).get_device_name()
        if kind.type == "cuda" and torch.version.hip is None:
            name += " (sm_{}{})".format(*torch.cuda.get_device_capability())
        return f"{name}, {torch.accelerator.device_count()} visible"
    except Exception:  # a torch that does not load, or a driver that fails: there is no accelerator to use
        return None


def _platform_plugin() -> str | None:
    """The class of the active platform plugin, by the rule of vLLM's ``resolve_current_platform_cls_qualname``."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return None
    for plugin in importlib.metadata.entry_points(group="vllm.platform_plugins"):
        try:
            qualname = plugin.load()() if _is_let_in(plugin.name, os.environ) else None
        except Exception:  # vLLM takes it for a plugin of another machine
            continue
        if qualname and qualname.partition(".")[0] != "vllm":
            return qualname
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


def as_dict(report: Report | None, environment: Environment | None) -> dict[str, Any]:
    """The report as JSON. ``environment`` is None for a vLLM that is not the installed one."""
    data: dict[str, Any] = {"peagle_vllm": __version__, "vllm": None, "patches": []}
    if report is not None:
        data["vllm"] = {
            "version": report.install.version,
            "distribution": report.install.distribution,
            "compared_with": report.compared_with,
            "served": not report.changed,
        }
        data["patches"] = [
            {
                "name": result.patch.name,
                "runner": result.patch.runner,
                "status": result.status,
                "changed": [
                    {"definition": change.definition.path, "recorded": change.recorded, "actual": change.digest}
                    for change in result.changed
                ],
            }
            for result in report.results
        ]
    if environment is not None:
        data |= {"python": platform.python_version(), **asdict(environment)}
        data |= {"plugin": environment.absent or "registered", "runner": decide_runner(environment, report)._asdict()}
    return data


_STYLES = {"holds": "green", "changed": "bold red", "accepted": "yellow"}


def show(console: Console, report: Report | None, environment: Environment | None) -> None:
    """Print the report; it reads well on 80 columns."""
    bad, facts = "bold red", Table.grid(padding=(0, 2))
    facts.add_row("peagle-vllm", __version__)
    if report is None:
        facts.add_row("vLLM", "not installed", style=bad)
    else:
        facts.add_row("vLLM", f"{report.install.version} ({report.install.distribution})")
        changed = sum(len(result.changed) for result in report.results)
        but = f", but for {changed} definition{'s' if changed > 1 else ''}" if changed else ""
        other = "" if report.install.minor == report.compared_with else "; this version itself is not recorded"
        facts.add_row("looks like", f"{report.compared_with}{but}{other}", style=bad if report.changed else None)
    if environment is not None:
        runner = decide_runner(environment, report)
        facts.add_row("torch", environment.torch or "not installed")
        facts.add_row("Triton", environment.triton or "not installed")
        facts.add_row("Python", platform.python_version())
        facts.add_row("platform", environment.device or "no accelerator visible")
        facts.add_row("plugin", environment.absent or "registered", style=bad if environment.absent else None)
        for name in VARIABLES:
            facts.add_row(name, environment.variables.get(name, "not set"))
        facts.add_row("P-EAGLE gets", runner.name, style="green" if runner.name in ("V1", "V2") else bad)
        facts.add_row("because", runner.why)
    console.print(facts, markup=False, highlight=False)
    if report is not None:
        _show_patches(console, report)


def _show_patches(console: Console, report: Report) -> None:
    table = Table("patch", "runner", "definitions", "state", box=None, padding=(0, 2, 0, 0))
    for result in report.results:
        state = Text(result.status, _STYLES[result.status])
        table.add_row(result.patch.name, result.patch.runner, str(len(result.patch.definitions)), state)
    console.print()
    console.print(table)
    for result in (*report.changed, *report.accepted):
        accepted = f", accepted by {ACCEPT}" if result.status == "accepted" else ""
        console.print(f"\n{result.patch.name}: {len(result.changed)} changed{accepted}", style="bold")
        for module, group in groupby(result.changed, key=lambda change: change.definition.module):
            console.print(f"  {module}", highlight=False)
            for change in group:
                console.print(f"    {change.definition.qualname}  {change.change}", highlight=False)
