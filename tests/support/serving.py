"""An OpenAI-compatible server on loopback for tests: started as a user would, always torn down."""

import os
import re
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from peagle_tools.shared import processes
from peagle_tools.shared.server import free_port as free_port

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 400
# What tests/conftest.py sets for engines inside the test process; a server runs as it would anywhere.
NOT_FOR_SERVERS = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_LOGGING_LEVEL")


def environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_FOR_SERVERS}
    return inherited | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True)
class Server:
    url: str
    process: psutil.Popen

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return response.read().decode()

    def metric(self, name: str) -> float:
        """Sum of a Prometheus metric over its labels; an error if the server does not show it."""
        values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert values, f"/metrics shows no {name}"
        return sum(map(float, values))


@contextmanager
def running(command: list[str], port: int, env: dict[str, str], ready: str = "/health") -> Iterator[Server]:
    """Run ``command`` until the block ends; it must answer ``ready`` on ``port`` in time."""
    with tempfile.NamedTemporaryFile() as log:
        # In a process group of its own, which ``processes.end`` ends.
        process = psutil.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        server = Server(f"http://127.0.0.1:{port}", process)
        try:
            _wait(server, ready, Path(log.name))
            yield server
        finally:
            processes.end(process)


def _wait(server: Server, ready: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while server.process.poll() is None and time.monotonic() < deadline:
        try:
            server.get(ready)
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.25)
    raise AssertionError(f"the server did not start; it wrote:\n{log.read_text()[-4000:]}")
