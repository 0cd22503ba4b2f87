"""vLLM's server: started, watched, ended."""

import contextlib
import json
import os
import socket
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from random import SystemRandom

import psutil

from peagle_tools.shared import processes

HOST = "127.0.0.1"
# A proxy of the environment does not reach this machine's servers; clients in processes started here inherit this.
if (hosts := os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "") != "*":
    os.environ["no_proxy"] = f"{hosts},{HOST}".lstrip(",")
# `vllm serve` is the same server. vLLM's CPU build has no working `vllm` command (it reads the version of a
# distribution named `vllm`); use the command here once it works.
COMMAND = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]


class ServerFailed(Exception):
    """The server did not start, or ended; the message gives the reason."""


def free_port() -> int:
    """A free port, below those that systems take for connections of others before a server begins to listen."""
    while True:
        port = SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError):
            socket.create_server((HOST, port)).close()
            return port


class Server(contextlib.AbstractContextManager["Server"]):
    """A running server with these arguments of ``vllm serve``, with its output in ``log``.

    Use as a context manager: it is gone afterwards, whatever happened.
    """

    def __init__(self, arguments: list[str], *, cwd: Path, env: Mapping[str, str], log: Path):
        self.port = free_port()
        self._url, self._log = f"http://{HOST}:{self.port}", log
        command = [*COMMAND, "--host", HOST, "--port", str(self.port), *arguments]
        env = {"VLLM_API_KEY": "", **env}  # its clients here send none
        self.process: psutil.Popen = processes.start(command, cwd=cwd, env=env, log=log)

    def __exit__(self, *_: object) -> None:
        processes.end(self.process)

    def check(self) -> None:
        """Raises ServerFailed when the server has ended."""
        if (status := self.process.poll()) is not None:
            raise self._failed(f"the server ended ({processes.how_it_ended(status)})")

    def check_well(self) -> None:
        """After a failure: raises ServerFailed when the server has ended, or is about to.

        A server whose engine has ended answers requests with errors for a while before it ends, too, and logs why.
        """
        time.sleep(1)
        if not (healthy := self._is_healthy()):
            with contextlib.suppress(psutil.TimeoutExpired):
                self.process.wait(15)
        self.check()
        if not healthy:
            raise self._failed("the server is not healthy any more")

    def wait_until_ready(self, seconds: float) -> float:
        """The seconds that it took. Raises ServerFailed when it ends first, or takes longer than ``seconds``."""
        began = time.monotonic()
        while not self._is_healthy():
            self.check()
            if time.monotonic() - began > seconds:
                raise self._failed(f"the server was not ready after {seconds:.0f} s")
            time.sleep(0.2)
        self.check()  # it was our server that answered
        return time.monotonic() - began

    def _failed(self, what: str) -> ServerFailed:
        return ServerFailed(f"{what}: {processes.failure_reason(self._log)}")

    def _is_healthy(self) -> bool:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{self._url}/health", timeout=5).close()
            return True
        return False

    def empty_prefix_cache(self) -> None:
        """Needs VLLM_SERVER_DEV_MODE=1 in the server's environment. Raises OSError where it was not emptied."""
        for _ in range(10):  # blocks of requests that were just given up are held for a while
            with urllib.request.urlopen(f"{self._url}/reset_prefix_cache", b"", 60) as reply:
                if json.load(reply)["success"]:
                    return
            time.sleep(0.5)
        raise OSError("its blocks are in use")
