"""The line of a log that says why a process ended."""

import re
from pathlib import Path

# A prefix of vLLM's log lines: "(EngineCore pid=12) ERROR 11-21 03:00:00 [core.py:1] ".
PREFIX = re.compile(r"^(?:\(.*?pid=\d+\)\s*)?(?:(?:ERROR|INFO|WARNING) [\d-]+ [\d:]+ \[[^\]]*\]\s*)?")
ERROR = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Refused\w*|Interrupt|Exit)\b:? ?.*")
VALUE_ERROR = re.compile(r"^Value error, (.*?)(?: \[type=.*)?$")  # pydantic's own second line
DIED = re.compile(r".*\b(?:died|Killed|out of memory|SIGKILL)\b.*")
MOST = 2_000_000  # characters to look at; a server that dies repeats its stack trace for every request
ECHOES = ("Engine core initialization failed", "EngineCore encountered an issue", "EngineDeadError")


def last_words(log: Path, limit: int = 400) -> str:
    """The most telling line: the last error that is no echo of another one, else that something died, else an echo,
    else the last line at all."""
    try:
        text = log.read_text(errors="replace")[-MOST:]
    except OSError:
        return "it left no log"
    lines = [PREFIX.sub("", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    if not lines:
        return "it wrote nothing"
    for pattern in (VALUE_ERROR, ERROR):
        for line in reversed(lines):
            if (found := pattern.match(line)) and not any(echo in line for echo in ECHOES):
                return (found[1] if pattern is VALUE_ERROR else line)[:limit]
    for pattern in (DIED, ERROR):
        for line in reversed(lines):
            if pattern.match(line):
                return line[:limit]
    return lines[-1][:limit]
