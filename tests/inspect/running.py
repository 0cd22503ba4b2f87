"""Running the command in this process, as a shell would on 80 columns."""

from dataclasses import dataclass

import pytest
from typer.testing import CliRunner

from peagle_tools.cli import app


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> Ran:
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)


def only_line(ran: Ran) -> str:
    """The one line of stderr of a command that could not read its input."""
    assert ran.code == 2
    assert ran.out == ""
    (line,) = ran.err.splitlines()
    assert line.startswith("peagle-vllm: ")
    return line
