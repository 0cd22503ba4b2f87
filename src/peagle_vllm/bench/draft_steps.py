"""How the server drafted: the counters that this package adds to vLLM's ``/metrics``."""

import re
from collections import Counter

from peagle_vllm.bench.cells import DraftSteps
from peagle_vllm.bench.server import Server

COUNTER = re.compile(r"^vllm:peagle_draft_(steps|rows|padding_rows)_total\{(.*)\} (\S+)$", re.MULTILINE)
MODE = re.compile(r'\bmode="(\w+)"')


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
    for name, labels, value in COUNTER.findall(text):
        mode = MODE.search(labels)
        counts[mode[1] if mode else name] += int(float(value))
    return DraftSteps(**counts) if counts else None
