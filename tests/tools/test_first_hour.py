"""Commands that the pages show are today's: they parse, and the files that they name are there."""

import re
import shlex
from pathlib import Path

import pytest
import typer
from click.testing import CliRunner

from peagle_tools.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    {*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("examples/*/README.md")}
)


def shown(page: Path) -> list[str]:
    """Every call of ``peagle-vllm`` in a block of code, without its comment; of a session what follows ``$``."""
    calls = []
    for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        typed = re.findall(r"^\$ (.*)$", block, re.MULTILINE) or block.splitlines()
        calls += [
            part for line in typed for part in re.split(r" (?:&&|\|\|) ", line) if part.startswith("peagle-vllm ")
        ]
    return [call.replace("[--", "--").replace("]", "") for call in calls]


@pytest.fixture
def parser():  # type: ignore[no-untyped-def]
    """The command line, whose commands do nothing."""

    def idle(command) -> None:  # type: ignore[no-untyped-def]
        for inner in getattr(command, "commands", {}).values():
            idle(inner)
        if not hasattr(command, "commands"):
            command.callback = lambda **_: None

    idle(command := typer.main.get_command(app))
    return command


@pytest.mark.parametrize("page", [page for page in PAGES if shown(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_shown_parses(page: Path, parser) -> None:  # type: ignore[no-untyped-def]
    for call in shown(page):
        done = CliRunner().invoke(parser, shlex.split(call, comments=True)[1:])
        assert done.exit_code == 0, f"{call}\n{done.output}"


def test_suites_shown_are_there() -> None:
    named = {word for page in PAGES for call in shown(page) for word in re.findall(r"benchmarks/suites/\S+", call)}
    assert named
    for file in named:
        assert (ROOT / file).exists(), file
