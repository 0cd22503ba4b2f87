"""The server of one session: started, watched, ended.

``vllm bench sweep serve`` starts servers, too. It is not used for that, because it gives all of them one
environment, throws their output away, measures whatever answers on the port, gives up a server's other runs when
one crashes, and leaves the server running when it is terminated itself.
"""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import psutil

from peagle_vllm.bench import BenchError, processes
from peagle_vllm.bench.cells import DraftSteps
from peagle_vllm.bench.processes import failure_reason
from peagle_vllm.bench.suite import Suite

HOST = "127.0.0.1"
MODEL_NAME = "target"  # what clients call the model, so that no path gets into a result
# `vllm serve` is the same server. vLLM's CPU build has no working `vllm` command (it asks for the version of a
# distribution named `vllm`); use the command here once that is mended.
SERVER = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
# Dev mode adds the endpoint that empties the prefix cache between cells. On loopback only.
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}

# Of /metrics: no counter of vLLM keeps the peak of the first; the second is what this package adds.
KV_USE = re.compile(r"^vllm:kv_cache_usage_perc(?:\{.*\})? (\S+)$", re.MULTILINE)
DRAFT_STEPS = re.compile(r"^vllm:peagle_draft_(steps|rows|padding_rows)_total\{(.*)\} (\S+)$", re.MULTILINE)
MODE = re.compile(r'\bmode="(\w+)"')
EVERY_SECONDS = 1.0  # between two looks at the gauges


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
        """Raises ServerFailed when it ends first, or takes longer than ``seconds``."""
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


class Gauges:
    """Call ``sample`` as often as you like; it looks once a second."""

    def __init__(self, server: Server):
        self._server, self._last = server, 0.0
        self._nvidia_smi = shutil.which("nvidia-smi")
        self.kv_use: list[float] = []  # share of the cache in use, 0..1, the mean over engines
        self.gpu_memory_mib: list[float] = []  # over all visible GPUs

    def sample(self) -> None:
        if time.monotonic() - self._last < EVERY_SECONDS:
            return
        self._last = time.monotonic()
        try:
            shares = [float(value) for value in KV_USE.findall(self._server.get("/metrics", timeout=5))]
        except OSError:  # the server is busy or gone; who waits for the cell notices the latter
            shares = []
        if shares:
            self.kv_use.append(sum(shares) / len(shares))
        if self._nvidia_smi:
            self.gpu_memory_mib += _gpu_memory(self._nvidia_smi)


def _gpu_memory(nvidia_smi: str) -> list[float]:
    command = [nvidia_smi, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return [sum(float(line) for line in done.stdout.split())]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def read_draft_steps(server: Server) -> DraftSteps | None:
    """The counters now, over all engines; None where the server shows none, or is busy or gone."""
    try:
        text = server.get("/metrics", timeout=30)
    except OSError:
        return None
    return draft_steps_of(text)


def draft_steps_of(text: str) -> DraftSteps | None:
    """The counters in the text of ``/metrics``; None where it holds none."""
    counts: Counter[str] = Counter()
    for name, labels, value in DRAFT_STEPS.findall(text):
        mode = MODE.search(labels)
        counts[mode[1] if mode else name] += int(float(value))
    return DraftSteps(**counts) if counts else None
