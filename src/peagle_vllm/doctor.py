"""``peagle-vllm doctor``: would P-EAGLE be served here, by which runner, and do the seams hold?

Imports no vLLM: a vLLM that is broken or unknown is exactly when a report is wanted.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from peagle_vllm import __version__
from peagle_vllm.seams.fingerprint import ACCEPT, Report
from peagle_vllm.seams.version import VllmInstall

PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME = "peagle"


@dataclass(frozen=True)
class Environment:
    """Everything outside vLLM's source that decides what P-EAGLE gets."""

    python: str
    torch: str | None
    triton: str | None
    device: str | None  # the accelerator's name; None: there is none
    cpu_build: bool
    no_triton: str  # why Model Runner V2 cannot have Triton here; empty: it can
    registered: bool  # the plugin is an installed entry point
    disabled: bool  # PEAGLE_VLLM_DISABLE=1
    vllm_plugins: str | None  # VLLM_PLUGINS as it is set
    use_v2: str | None  # VLLM_USE_V2_MODEL_RUNNER as it is set
    accept: str | None = None  # PEAGLE_VLLM_ACCEPT as it is set
    platform: str | None = None  # the class of a platform plugin that is active; None: one of vLLM's own platforms

    @property
    def excluded(self) -> bool:
        """Whether ``VLLM_PLUGINS`` keeps the plugin out. vLLM splits at commas and strips nothing."""
        return not _is_let_in(PLUGIN_NAME, self.vllm_plugins)


def _is_let_in(plugin: str, vllm_plugins: str | None) -> bool:
    return vllm_plugins is None or plugin in vllm_plugins.split(",")


@dataclass(frozen=True)
class Runner:
    """What a P-EAGLE configuration gets."""

    name: Literal["V2", "V1", "stock vLLM", "out-of-tree", "refused", "none"]
    why: str


def read_environment(install: VllmInstall | None) -> Environment:
    """Look at this process and machine. Imports torch, Triton's list of backends, and platform plugins."""
    cpu_build = install is not None and "cpu" in f"{install.distribution} {install.version}"
    device = None if cpu_build else _accelerator()
    return Environment(
        python=platform.python_version(),
        torch=_version("torch"),
        triton=_version("triton"),
        device=device,
        cpu_build=cpu_build,
        no_triton=_why_no_triton(cpu_build, device),
        registered=bool(importlib.metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME)),
        disabled=os.environ.get("PEAGLE_VLLM_DISABLE") == "1",
        vllm_plugins=os.environ.get("VLLM_PLUGINS"),
        use_v2=os.environ.get("VLLM_USE_V2_MODEL_RUNNER"),
        accept=os.environ.get(ACCEPT),
        platform=_platform_plugin(os.environ.get("VLLM_PLUGINS")),
    )


def decide_runner(environment: Environment, report: Report | None) -> Runner:
    """The runner that P-EAGLE gets, in the order in which the plugin and vLLM decide it."""
    if report is None:
        return Runner("none", 'vLLM is not installed: pip install "peagle-vllm[cuda]" or "peagle-vllm[cpu]"')
    forced = _forced(environment.use_v2)
    absent = _why_no_plugin(environment)
    if absent:
        if forced == "V2" and "gate" not in _not_needed(report):
            return Runner("refused", f"{absent}; VLLM_USE_V2_MODEL_RUNNER asks for V2, where stock vLLM has no P-EAGLE")
        return Runner("stock vLLM", f"{absent}; where V2 lacks P-EAGLE, vLLM falls back to V1")
    if environment.platform:
        return Runner("out-of-tree", f"{environment.platform} brings workers of its own, and the plugin leaves them be")
    if report.moved:
        return Runner("refused", report.differs(report.moved))
    if not environment.cpu_build and environment.device is None:
        return Runner("none", "no accelerator is visible, and this is no CPU build of vLLM")
    if forced == "invalid":
        return Runner("none", f"VLLM_USE_V2_MODEL_RUNNER={environment.use_v2} is no number, so vLLM does not start")
    if forced == "V2" and environment.no_triton:
        return Runner("none", f"VLLM_USE_V2_MODEL_RUNNER asks for V2, which needs Triton: {environment.no_triton}")
    if forced:
        return Runner(forced, f"VLLM_USE_V2_MODEL_RUNNER={environment.use_v2} asks for it")
    if environment.no_triton:
        return Runner("V1", f"V2 needs Triton: {environment.no_triton}")
    return Runner("V2", "vLLM's default, unless another setting of the server needs V1, or --worker-cls is not vLLM's")


def _forced(use_v2: str | None) -> Literal["V2", "V1", "invalid"] | None:
    if use_v2 is None:
        return None
    try:
        return "V2" if int(use_v2) else "V1"
    except ValueError:
        return "invalid"


def _why_no_plugin(environment: Environment) -> str:
    if not environment.registered:
        return "the plugin is not installed here (no entry point)"
    if environment.excluded:
        return f"VLLM_PLUGINS={environment.vllm_plugins} leaves out {PLUGIN_NAME}"
    return "PEAGLE_VLLM_DISABLE=1" if environment.disabled else ""


def _not_needed(report: Report) -> list[str]:
    return [result.seam.name for result in report.results if result.status == "not needed"]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


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


def _platform_plugin(vllm_plugins: str | None) -> str | None:
    """The class of the active platform plugin, by the rule of vLLM's ``resolve_current_platform_cls_qualname``."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return None
    for plugin in importlib.metadata.entry_points(group="vllm.platform_plugins"):
        try:
            qualname = plugin.load()() if _is_let_in(plugin.name, vllm_plugins) else None
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


# --------------------------------------------------------------------------------------- as data


def as_dict(report: Report | None, environment: Environment | None, runner: Runner | None) -> dict[str, Any]:
    """The report for machines; what ``--vllm PATH`` cannot tell is left out."""
    data: dict[str, Any] = {"peagle_vllm": __version__, "vllm": None, "seams": []}
    if report is not None:
        data["vllm"] = {
            "version": report.version,
            "distribution": report.install.distribution,
            "compared_with": report.compared_with,
            "served": report.ok,
        }
        data["seams"] = [
            {
                "name": result.seam.name,
                "runner": result.seam.runner,
                "status": result.status,
                "moved": [
                    {"touch": touch.touch.path, "recorded": touch.recorded, "found": touch.found}
                    for touch in result.moved
                ],
            }
            for result in report.results
        ]
    if environment is not None and runner is not None:
        data |= {
            "python": environment.python,
            "torch": environment.torch,
            "triton": environment.triton,
            "device": environment.device or ("CPU" if environment.cpu_build else None),
            "plugin": {
                "registered": environment.registered,
                "disabled": environment.disabled,
                "VLLM_PLUGINS": environment.vllm_plugins,
                "excluded": environment.excluded,
            },
            "platform_plugin": environment.platform,
            "VLLM_USE_V2_MODEL_RUNNER": environment.use_v2,
            ACCEPT: environment.accept,
            "runner": {"name": runner.name, "why": runner.why},
        }
    return data


# -------------------------------------------------------------------------------------- for people

_STYLES = {"holds": "green", "moved": "bold red", "accepted": "yellow", "not needed": "cyan"}


def show(console: Console, report: Report | None, environment: Environment | None, runner: Runner | None) -> None:
    """Print the report; it reads well on 80 columns."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column()

    def fact(name: str, value: str, style: str = "") -> None:
        facts.add_row(name, Text(value, style))

    fact("peagle-vllm", __version__)
    if report is None:
        fact("vLLM", "not installed", "bold red")
    else:
        fact("vLLM", f"{report.version} ({report.install.distribution})")
        fact("looks like", _likeness(report), "" if report.ok else "bold red")
    if environment is not None and runner is not None:
        _environment_facts(fact, environment)
        fact("P-EAGLE gets", runner.name, "green" if runner.name in ("V1", "V2") else "bold red")
        fact("because", runner.why)
    console.print(facts)
    if report is not None:
        _show_seams(console, report)


def _likeness(report: Report) -> str:
    changed = sum(len(result.moved) for result in report.results)
    but = f", but for {changed} definition{'s' if changed > 1 else ''}" if changed else ""
    other = "" if report.install.minor == report.compared_with else "; this version itself is not recorded"
    return f"{report.compared_with}{but}{other}"


def _environment_facts(fact: Callable[..., None], environment: Environment) -> None:
    fact("torch", environment.torch or "not installed")
    fact("Triton", environment.triton or "not installed")
    fact("Python", environment.python)
    fact("platform", environment.device or ("CPU" if environment.cpu_build else "no accelerator visible"))
    if not environment.registered:
        fact("plugin", "not installed as an entry point: pip install peagle-vllm", "bold red")
    elif environment.excluded:
        fact("plugin", f"left out by VLLM_PLUGINS={environment.vllm_plugins}", "bold red")
    elif environment.disabled:
        fact("plugin", "switched off by PEAGLE_VLLM_DISABLE=1", "bold red")
    else:
        fact("plugin", "registered")
    for name, value in (
        ("PEAGLE_VLLM_DISABLE", "1" if environment.disabled else None),
        ("VLLM_PLUGINS", environment.vllm_plugins),
        ("VLLM_USE_V2_MODEL_RUNNER", environment.use_v2),
        (ACCEPT, environment.accept),
    ):
        fact(name, "not set" if value is None else value)


def _show_seams(console: Console, report: Report) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("seam", "runner", "touches", "state"):
        table.add_column(column, justify="right" if column == "touches" else "left")
    for result in report.results:
        state = Text(result.status, _STYLES[result.status])
        table.add_row(result.seam.name, result.seam.runner, str(len(result.seam.touches)), state)
    console.print()
    console.print(table)
    for result in (*report.moved, *report.accepted):
        accepted = f", accepted by {ACCEPT}" if result.status == "accepted" else ""
        console.print(f"\n{result.seam.name}: {len(result.moved)} moved{accepted}", style="bold")
        by_module = sorted(result.moved, key=lambda moved: moved.touch.module)
        for module, group in groupby(by_module, key=lambda moved: moved.touch.module):
            console.print(f"  {module}", highlight=False)
            for moved in group:
                console.print(f"    {moved.touch.qualname}  {moved.change}", highlight=False)
