"""Processes that share a device: many start, or prove drafts, at once; what is timed has the device to itself.

A process that calls nothing here is not waited for.
"""

import fcntl
import os
import signal

FILE = "PEAGLE_TURNS"  # names the file that all of them lock
_file: int | None = None  # its descriptor


def share(seconds: int = 0) -> None:
    """From now on nothing is timed, until this process ends or calls ``have_to_itself``.

    Until then it lives so many ``seconds`` at most, since others wait for it; 0: no limit.
    """
    global _file
    if FILE in os.environ:
        _file = os.open(os.environ[FILE], os.O_RDWR | os.O_CREAT)
        fcntl.flock(_file, fcntl.LOCK_SH)
        signal.alarm(seconds)


def have_to_itself(seconds: int) -> None:
    """Return once no other process shares the device; others wait until this one ends, in ``seconds`` at most."""
    if _file is not None:
        signal.alarm(0)
        fcntl.flock(_file, fcntl.LOCK_EX)
        signal.alarm(seconds)
