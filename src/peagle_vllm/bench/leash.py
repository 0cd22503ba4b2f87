"""Run a command that ends when its parent does: ``python leash.py COMMAND ...``.

A sweep that is killed outright (SIGKILL, out of memory) can clean nothing up; so the kernel is asked to send
SIGTERM to this process, which then becomes the command, when the thread that started it dies. Run by path, with
the standard library only: importing the package would cost more than the rest of it.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the kernel was asked
        raise SystemExit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
