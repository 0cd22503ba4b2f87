"""How a tool ends that cannot go on."""

from peagle_vllm.heads.files import as_line


class ToolError(Exception):
    """A command cannot go on. The message is one line: what, where, how to mend it."""

    def __init__(self, line: str):
        super().__init__(as_line(line))
