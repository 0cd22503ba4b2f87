"""Run a command that ends when its parent, a process id, does: ``python die_with_parent.py PARENT COMMAND ...``.

A sweep that is killed outright (SIGKILL, out of memory) cannot end what it started. So this process asks the kernel to
send it SIGTERM when its parent ends, and then becomes the command. Run by path and with the standard library only,
because importing the package would take longer than all the rest.
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
    if os.getppid() != parent:  # it ended before the kernel was asked
        raise SystemExit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
