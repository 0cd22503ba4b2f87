"""Child processes: started so that none outlives this one, ended with everything they started, and why they ended."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

# A process that is killed outright (SIGKILL, out of memory) cannot end what it started. So a child requests SIGTERM for
# the end of its parent (PR_SET_PDEATHSIG is 1), makes sure that the parent is still there, and becomes the command.
# vLLM loses a SIGTERM that comes while its engine starts: after some time a watcher kills the child's whole group.
# Standard library only: importing this package would take longer than all the rest.
DIE_WITH_PARENT = """\
import ctypes, os, signal, sys, time
parent, patience, command = sys.argv[1], float(sys.argv[2]), os.getpid()
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if str(os.getppid()) != parent:
    sys.exit(1)
if sys.platform == "linux" and os.fork() == 0:
    os.setpgid(0, 0)  # nobody who ends the group waits for the watcher
    try:
        while open(f"/proc/{command}/stat").read().rpartition(")")[2].split()[1] == parent:
            time.sleep(1)
        time.sleep(patience)
        os.killpg(command, signal.SIGKILL)
    finally:  # also where the command has ended
        os._exit(0)
os.execvp(sys.argv[3], sys.argv[3:])
"""
PATIENCE = 20  # seconds from SIGTERM to SIGKILL


def end_with_parent(parent: int) -> None:
    """This process is killed when ``parent``, which started it, ends in whatever way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def start(command: list[str], *, cwd: Path, env: Mapping[str, str], log: Path) -> psutil.Popen:
    """Start ``command`` in a process group of its own, with its output in ``log``; it ends when this process does.

    ``log`` starts empty: the reason for which an earlier process failed must not be found in it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    words = [sys.executable, "-S", "-E", "-c", DIE_WITH_PARENT, str(os.getpid()), str(PATIENCE), *command]
    with log.open("ab") as out:
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
        return psutil.Popen(words, cwd=cwd, env={**os.environ, **env}, start_new_session=True, **streams)


def end(process: psutil.Popen, patience: float = PATIENCE) -> None:
    """End a process and its whole group: SIGTERM, after ``patience`` seconds SIGKILL. Returns when none is left."""
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 10)):
        if members := _group(process):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        if not psutil.wait_procs(members, seconds)[1]:
            break


def _group(process: psutil.Popen) -> list[psutil.Process]:
    """The members of the group that are still there, those whose parent has ended too."""
    # This Popen object: reaping through another would lose the exit status.
    members = [process] if process.poll() is None else []
    for other in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            same_group = other.pid != process.pid and os.getpgid(other.pid) == process.pid
            if same_group and other.status() != psutil.STATUS_ZOMBIE:
                members.append(other)
    return members


def how_it_ended(returncode: int) -> str:
    """``exit status 1``, or ``killed by SIGKILL``."""
    return f"exit status {returncode}" if returncode >= 0 else f"killed by {signal.Signals(-returncode).name}"


# A prefix of vLLM's log lines: "(EngineCore pid=12) [rank0]: ERROR 11-21 03:00:00 [core.py:1] ".
PREFIX = re.compile(r"^(?:\(.*?pid=\d+\)\s*)?(?:\[rank\d+\]:\s*)?(?:(?:ERROR|INFO|WARNING) [\d-]+ [\d:]+ \[.*?\]\s*)?")
VALUE_ERROR = re.compile(r"^Value error, (?P<reason>.*?)(?: \[type=.*)?$")  # the second line of pydantic's message
ERROR = re.compile(r"^(?P<reason>[A-Za-z_][\w.]*(?:Error|Exception|Refused\w*|Interrupt|Exit)\b:? ?.*)")
DIED = re.compile(r"^(?P<reason>.*\b(?:died|Killed|out of memory|SIGKILL)\b.*)")
ECHOES = ("Engine core initialization failed", "EngineCore encountered an issue", "EngineDeadError")
MOST = 2_000_000  # characters that are read; a server whose engine has ended repeats its stack trace for every request


def failure_reason(log: Path, limit: int = 400) -> str:
    """The line of a log that gives the reason why a process ended, at most ``limit`` characters.

    The last error that does not merely repeat another one; else a line about something that died; else the last
    error at all; else the last line.
    """
    text = log.read_text(errors="replace")[-MOST:]
    lines = [line for row in reversed(text.splitlines()) if (line := PREFIX.sub("", row).strip())]
    if not lines:
        return "it wrote nothing"
    causes = [line for line in lines if not any(echo in line for echo in ECHOES)]
    for pattern, candidates in ((VALUE_ERROR, causes), (ERROR, causes), (DIED, lines), (ERROR, lines)):
        for line in candidates:
            if match := pattern.match(line):
                return match["reason"][:limit]
    return lines[0][:limit]
