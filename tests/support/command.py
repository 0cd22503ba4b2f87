"""Running the command in this process, as a shell would on 80 columns."""

from typer.testing import CliRunner, Result

from peagle_tools.cli import app


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, [*map(str, arguments)], catch_exceptions=False)


def only_line(ran: Result) -> str:
    """The one line of stderr of a command that could not read its input."""
    assert ran.exit_code == 2
    assert ran.stdout == ""
    (line,) = ran.stderr.splitlines()
    assert line.startswith("peagle-vllm: ")
    return line
