"""Child processes that never outlive the sweep, with everything they start."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

LEASH = Path(__file__).with_name("leash.py")


def start(command: list[str], *, cwd: Path, env: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """Start ``command`` in a process group of its own, on a leash, with its output in ``log``."""
    leashed = [sys.executable, "-S", "-E", str(LEASH), str(os.getpid()), *command]
    with log.open("ab") as out:
        return subprocess.Popen(
            leashed,
            cwd=cwd,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(process: "subprocess.Popen[bytes]", patience: float = 20) -> None:
    """End a process and its whole group: SIGTERM, then SIGKILL. Returns when none of them is left."""
    for sign, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, sign)
        except (ProcessLookupError, PermissionError):
            break
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and _group_lives(process):
            time.sleep(0.03)
    process.poll()


def _group_lives(process: "subprocess.Popen[bytes]") -> bool:
    process.poll()  # reaps it; a zombie would keep the group alive
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS says so about zombies
        return process.returncode is None
    return True


def how_it_ended(returncode: int) -> str:
    """An exit status in words."""
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"
