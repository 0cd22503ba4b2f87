"""Parts of a day on a GPU: processes with limits, whose finished tests and cells are kept if one is killed."""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks import arms, turns
from benchmarks.arms import FILE, HAS_GPU
from peagle_tools.shared import processes
from peagle_tools.shared.atomic_files import write_whole
from peagle_tools.train.lines import read_lines

PYTEST = (
    *("pytest", "-q", "-s", "-p", "no:cacheprovider", "-p", "benchmarks.outcomes", "--outcomes", FILE),
    "--hypothesis-seed=0",  # so that the examples are those whose kernels a rehearsal has compiled
)
STATE = "state.json"
TRIES = 2
LEAST = 60  # seconds in which a part that was cut off can still finish something
SIDE_BY_SIDE = min(10, (os.cpu_count() or 1) * 2 // 3) if HAS_GPU else 2


@dataclass(frozen=True)
class Part:
    """One process: what follows ``python -m``, its limit in seconds, and its own environment variables."""

    name: str
    command: tuple[str, ...]
    limit: float = 240
    env: dict[str, str] = field(default_factory=dict)

    @property
    def runs_tests(self) -> bool:
        return self.command[:1] == PYTEST[:1]

    @property
    def label(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in self.name)


class State:
    """How far each part is, on the disk at every change.

    By part name: "state" is done, failed, cut (by the end of the time), running (the driver was killed), or too early
    (an earlier part is not done); "tries".
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.file, self._lock = folder / STATE, threading.Lock()
        self.entries: dict[str, dict[str, Any]] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def keep(self, part: Part, **entry: Any) -> None:
        with self._lock:
            self.entries[part.name] = entry
            write_whole(self.file, json.dumps(self.entries, indent=1))
            print(f"{part.name}: " + ", ".join(map(str, entry.values())), flush=True)


def run_parts(groups: Sequence[Sequence[Part]], folder: Path, seconds: float = math.inf) -> dict[str, dict[str, Any]]:
    """Run what is not done, in this order; those of a group side by side, taking turns at what they time.

    A part begins where at least half of its limit is left of ``seconds``; one that was cut off, where ``LEAST`` is.

    Returns:
        ``State.entries``.
    """
    state, deadline = State(folder), time.monotonic() + seconds
    for group in groups:
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            for _ in pool.map(lambda part: attempt(part, folder, state, deadline), group):
                pass
    return state.entries


def attempt(part: Part, folder: Path, state: State, deadline: float) -> None:
    """Run the part, unless it is done, was tried ``TRIES`` times, or has too little time left."""
    past = state.entries.get(part.name, {"state": "", "tries": 0})
    left = deadline - time.monotonic()
    least = min(part.limit / 2, LEAST if past["state"] == "cut" else math.inf)
    if past["state"] == "done" or past["tries"] == TRIES or left < least:
        return
    tries = past["tries"] + 1
    state.keep(part, state="running", tries=tries)
    began = time.monotonic()
    outcome = run(part, folder, tries, left)
    tries -= outcome["state"] == "too early"
    state.keep(part, **outcome, tries=tries, seconds=round(time.monotonic() - began))


def run(part: Part, folder: Path, tries: int, left: float) -> dict[str, Any]:
    """One try of a part in a process of its own, for at most ``left`` seconds."""
    out, log = folder / f"{part.label}.{tries}", folder / f"{part.label}.{tries}.log"
    command = [sys.executable, "-m", *(word.replace("OUT.", f"{out.resolve()}.") for word in part.command)]
    env = {"VLLM_LOGGING_LEVEL": "INFO", turns.FILE: f"{folder / 'turns'}", arms.COMPILED: f"{out.resolve()}.compiled"}
    env = arms.environment(env | part.env)
    process = processes.start(command, cwd=arms.ROOT, env=env, log=log)
    try:
        code = process.wait(min(part.limit, left))
    except psutil.TimeoutExpired:
        if left < part.limit:
            return {"state": "cut"}
        return {"state": "failed", "error": f"took longer than its limit of {part.limit:.0f} s"}
    finally:
        processes.end(process, patience=15)
    if code == 0 and best(part, folder):
        return {"state": "done"}
    if code == arms.TOO_EARLY:
        return {"state": "too early", "error": processes.failure_reason(log)}
    return {"state": "failed", "error": processes.failure_reason(log)}


def best(part: Part, folder: Path) -> list[dict[str, Any]]:
    """The cells or tests that the try that got furthest has finished."""
    return max(([*read_lines(file)] for file in folder.glob(f"{part.label}.*.jsonl")), key=len, default=[])
