"""How a tool ends that cannot go on."""

from peagle_vllm.heads.files import as_line


class ToolError(Exception):
    """A command cannot go on. The message is a line for each mistake: what, where, how to mend it."""

    status = 2  # the command's exit status

    def __init__(self, lines: str):
        super().__init__("\n".join(map(as_line, lines.split("\n"))))


class TryAgain(ToolError):
    """What a second try may mend, such as a server that ended."""

    status = 75  # EX_TEMPFAIL
