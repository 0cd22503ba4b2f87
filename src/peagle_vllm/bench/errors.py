"""The one error of these tools: its message is the line that the user reads."""


class BenchError(Exception):
    """Unusable input or surroundings; ends the command with exit status 2."""
