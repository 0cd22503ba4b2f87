"""KV-cache use and GPU memory, sampled while a cell runs: no counter of vLLM keeps their peak."""

import re
import shutil
import subprocess
import time

from peagle_vllm.bench.server import Server

KV_USE = re.compile(r"^vllm:kv_cache_usage_perc(?:\{.*\})? (\S+)$", re.MULTILINE)
EVERY_SECONDS = 1.0


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
