"""What the subcommands share: their common arguments, and how they end."""

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from peagle_vllm.heads.checks import Problem

HeadArgument = Annotated[str, typer.Argument(metavar="HEAD", help="A head's folder, or its id on the hub.")]
RevisionOption = Annotated[str | None, typer.Option(metavar="REV", help="The head's branch, tag or commit on the hub.")]
EngineOption = Annotated[
    str, typer.Option("--engine", metavar="JSON", help='More arguments of vLLM\'s LLM: {"tensor_parallel_size": 2}.')
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def fail(message: str, status: int = 2) -> NoReturn:
    """Every line of ``message`` on stderr, and this exit status."""
    for line in message.splitlines():
        print(f"peagle-vllm: {line}", file=sys.stderr)
    raise typer.Exit(status)


def exit_on_sigterm() -> None:
    """So that what is half written is removed, and a server is ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def check_extra(*more: str) -> None:
    """Exit with the name of a package that is missing; where vLLM is installed too, most of them are there."""
    for name in ("pydantic", "yaml", "psutil", "pandas", *more):
        if importlib.util.find_spec(name) is None:
            extra = "cuda,bench" if name == "vllm" else "bench"
            fail(f'{"pyyaml" if name == "yaml" else name} is not installed: pip install "peagle-vllm[{extra}]"')


@contextmanager
def one_line_errors(extra: str = "") -> Iterator[None]:
    """An error ends the command with its line: exit status 2, or 75 where a second try may succeed.

    Args:
        extra: of this package, which brings a module that is not installed.
    """
    from safetensors import SafetensorError

    from peagle_tools.shared.errors import ToolError
    from peagle_vllm.heads.files import HeadError, one_line

    then = "fix that, and run the command again"
    try:
        yield
    except (HeadError, ToolError) as error:
        # torch puts its traceback before an error of a loader's process.
        fail(str(error).rpartition("ToolError: ")[2], getattr(error, "status", 2))
    except SafetensorError as error:  # such as that of a full disk
        fail(f"a file of tensors: {one_line(error)}; {then}")
    except BrokenPipeError:  # who reads the output has ended
        raise
    except OSError as error:
        fail(f"{f'{error.filename}: {error.strerror}' if error.filename else one_line(error)}; {then}")
    except ModuleNotFoundError as error:
        if not extra:
            raise
        constraints = " (with vLLM: requirements/train.txt)" if extra == "train" else ""
        extra = "cuda" if error.name == "vllm" else extra
        fail(f'{error.name or one_line(error)} is not installed: pip install "peagle-vllm[{extra}]"{constraints}')


def exit_if_unfit(problems: "Iterable[Problem]") -> None:
    """Print each problem on stderr; end with exit status 1 if one is an error."""
    problems = list(problems)
    for problem in problems:
        print(f"{problem.severity}: {problem.line}", file=sys.stderr)
    if any(problem.severity == "error" for problem in problems):
        raise typer.Exit(1)


@contextmanager
def logs_on_stderr() -> Iterator[None]:
    """Send what vLLM, its libraries and its processes write to stdout to stderr: stdout is for the result."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def json_object(text: str) -> dict[str, Any]:
    with suppress(ValueError):
        if isinstance(arguments := json.loads(text), dict):
            if "speculative_config" in arguments:
                fail("--engine: the command itself sets speculative_config; leave it out")
            return arguments
    fail('--engine is not a JSON object; write it as {"tensor_parallel_size": 2}')
