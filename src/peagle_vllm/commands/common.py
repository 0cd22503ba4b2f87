"""What the subcommands share."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer


def fail(message: str) -> NoReturn:
    """End with a line on stderr and exit status 2: the input is unusable."""
    print(f"peagle-vllm: {message}", file=sys.stderr)
    raise typer.Exit(2)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """A head or target that cannot be read ends the command with its line."""
    from peagle_vllm.heads.files import HeadError

    try:
        yield
    except HeadError as error:
        fail(str(error))
