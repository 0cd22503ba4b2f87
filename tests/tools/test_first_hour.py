"""Commands that the pages show are today's: they parse, and docs/first-hour.md is what its script types."""

import re
import shlex
from pathlib import Path

import pytest
import typer
from click.testing import CliRunner

from peagle_tools.cli import app
from tools import first_hour

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    {*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("examples/*/README.md")}
)
FOLDERS = re.compile(r"""(?:^|[\s"'(=])(?:/[a-z]|~/)|://""", re.MULTILINE)  # absolute paths and hosts


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
    shipped = {word for page in PAGES for call in shown(page) for word in re.findall(r"--suite (\S+)", call)}
    assert named and shipped
    for file in [*named, *(f"src/peagle_tools/bench/suites/{name}.yaml" for name in shipped)]:
        assert (ROOT / file).exists(), file


def test_the_first_hour_is_what_its_script_types() -> None:
    page = first_hour.PAGE.read_text()
    typed = [command for _, commands in first_hour.STEPS for command in commands]
    assert re.findall(r"^\$ (.+)$", page, re.MULTILINE) == typed
    assert all(text in page for text, _ in first_hour.STEPS) and page.startswith(first_hour.INTRODUCTION)
    assert "\nexit status 1\n" in page and "--speculative-config '{" in page
    assert not FOLDERS.search(page)
