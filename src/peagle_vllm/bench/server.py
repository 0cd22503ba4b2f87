"""The server of one session: started, watched, ended.

``vllm bench sweep serve`` starts servers, too. It is not used for that, because it gives all of them one
environment, throws their output away, believes whatever answers on the port, gives up a server's other runs when
one crashes, and leaves the server running when it is terminated itself.
"""

import json
import socket
import sys
import time
import urllib.request
from pathlib import Path

import psutil

from peagle_vllm.bench import BenchError, processes
from peagle_vllm.bench.processes import failure_reason
from peagle_vllm.bench.suite import Suite

HOST = "127.0.0.1"
MODEL_NAME = "target"  # what clients call the model, so that no path gets into a result
# `vllm serve` is the same server. vLLM's CPU build has no working `vllm` command (it asks for the version of a
# distribution named `vllm`); use the command here once that is mended.
SERVER = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
# Dev mode adds the endpoint that empties the prefix cache between cells. On loopback only.
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}


class ServerFailed(Exception):
    """The server did not start, or died; the message says why."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind((HOST, 0))
        return int(s.getsockname()[1])


def check_port(port: int) -> None:
    """Raises BenchError when something listens there: it would be measured in place of our server."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((HOST, port))
        except OSError as error:
            raise BenchError(
                f"port {port} is in use ({error.strerror}); end what listens there, or leave `port` out of the suite"
            ) from None


def serve_arguments(suite: Suite, arm_name: str, k: int) -> list[str]:
    """Arguments of the server for one arm at one depth; host and port are left out."""
    arm = suite.arms[arm_name]
    arguments = ["--model", suite.target, "--served-model-name", MODEL_NAME, *suite.serve.words, *arm.words]
    if (config := arm.config_at(k)) is not None:
        arguments += ["--speculative-config", json.dumps(config)]
    return arguments


def client_environment(suite: Suite) -> dict[str, str]:
    """What all arms share: nothing in which arms differ may reach the client."""
    return ENVIRONMENT | suite.serve.environment


def serve_environment(suite: Suite, arm_name: str) -> dict[str, str]:
    return client_environment(suite) | suite.arms[arm_name].environment


class Server:
    """A running server. Use as a context manager: it is gone afterwards, whatever happened."""

    def __init__(
        self,
        arguments: list[str],
        environment: dict[str, str],
        *,
        port: int,
        cwd: Path,
        log: Path,
        command: list[str] | None = None,
    ):
        self.port, self.log, self.url = port, log, f"http://{HOST}:{port}"
        self._cwd, self._environment = cwd, environment
        self._command = [*(command or SERVER), "--host", HOST, "--port", str(port), *arguments]
        self._process: psutil.Popen | None = None
        self.start_seconds = 0.0

    def __enter__(self) -> "Server":
        check_port(self.port)
        self._process = processes.start(self._command, cwd=self._cwd, env=self._environment, log=self.log)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            processes.end(self._process)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def check(self) -> None:
        """Raises ServerFailed when the server has ended."""
        assert self._process is not None
        if (status := self._process.poll()) is not None:
            raise ServerFailed(f"the server ended ({processes.how_it_ended(status)}): {failure_reason(self.log)}")

    def check_well(self, patience: float = 1, more_patience: float = 15) -> None:
        """After a cell failed: raises ServerFailed when the server has ended, or is about to.

        A server whose engine died answers requests with errors for a while before it ends. So one that stays healthy
        for ``patience`` seconds is well, and one that does not gets ``more_patience`` to end and to say why.
        """
        began, healthy = time.monotonic(), True
        while time.monotonic() - began < (patience if healthy else more_patience):
            self.check()
            healthy = healthy and self._is_healthy()
            time.sleep(0.2)
        self.check()
        if not healthy:
            raise ServerFailed(f"the server is not healthy any more: {failure_reason(self.log)}")

    def _is_healthy(self) -> bool:
        try:
            self.get("/health", timeout=5)
        except OSError:
            return False
        return True

    def wait_until_ready(self, seconds: float) -> None:
        """Raises ServerFailed when it dies first, or takes longer than ``seconds``."""
        began, pause = time.monotonic(), 0.05
        while True:
            self.check()
            if self._is_healthy():
                break
            if time.monotonic() - began > seconds:
                raise ServerFailed(f"the server was not ready after {seconds:.0f} s: {failure_reason(self.log)}")
            time.sleep(pause)
            pause = min(0.5, 1.3 * pause)
        self.check()  # it was our server that answered
        self.start_seconds = time.monotonic() - began

    def get(self, path: str, timeout: float = 30) -> str:
        with urllib.request.urlopen(self.url + path, timeout=timeout) as answer:
            return answer.read().decode()

    def empty_prefix_cache(self) -> None:
        """So that no cell finds its prompts already computed by the cell before."""
        request = urllib.request.Request(self.url + "/reset_prefix_cache", method="POST")
        with urllib.request.urlopen(request, timeout=60):
            pass
