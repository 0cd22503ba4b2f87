"""What a server says of itself while a cell runs: KV-cache use and GPU memory, whose peak no counter of vLLM keeps, and
the draft steps that this package adds to its ``/metrics``."""

import re
import shutil
import subprocess
import time
from collections import Counter

from peagle_vllm.bench.cells import DraftSteps
from peagle_vllm.bench.server import Server

KV_USE = re.compile(r"^vllm:kv_cache_usage_perc(?:\{.*\})? (\S+)$", re.MULTILINE)
DRAFT_STEPS = re.compile(r"^vllm:peagle_draft_(steps|rows|padding_rows)_total\{(.*)\} (\S+)$", re.MULTILINE)
MODE = re.compile(r'\bmode="(\w+)"')
EVERY_SECONDS = 1.0  # between two looks at the gauges


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
