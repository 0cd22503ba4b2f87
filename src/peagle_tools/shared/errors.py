"""Errors that end a command."""

from peagle_vllm.heads.files import as_line


class ToolError(Exception):
    """A command cannot continue. The message is a line for each mistake: what, where, how to fix it."""

    status = 2  # the command's exit status

    def __init__(self, lines: str):
        super().__init__("\n".join(map(as_line, lines.split("\n"))))


class TryAgain(ToolError):
    """What a second try may solve, such as a server that ended."""

    status = 75  # EX_TEMPFAIL
