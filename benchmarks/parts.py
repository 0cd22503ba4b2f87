"""Parts of a day on a GPU: processes with limits, whose finished tests and cells are kept if one is killed.

This is a plugin of pytest, too: each test's outcome is on the disk when it ends; pytest writes its JUnit file after the
last one.
"""

import math
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks import arms, turns
from benchmarks.arms import CELLS, HAS_GPU
from peagle_tools.shared import processes
from peagle_tools.train.lines import add_line, read_lines

PYTEST = (
    *("pytest", "-q", "-s", "-p", "no:cacheprovider", "-p", "benchmarks.parts"),
    "--hypothesis-seed=0",  # so that the examples are those whose kernels a rehearsal has compiled
)
STATE = "state.jsonl"
LEAST = 60  # seconds in which a part can finish something
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


def run_parts(groups: Sequence[Sequence[Part]], folder: Path, seconds: float = math.inf) -> None:
    """Run what is not done, in this order; those of a group side by side, taking turns at what they time.

    A part begins where at least ``LEAST`` of ``seconds`` are left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    for group in groups:
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            try:
                list(pool.map(lambda part: attempt(part, folder, deadline), group))
            except BaseException:  # Ctrl+C reaches none of them: each is in a session of its own
                pool.shutdown(wait=False, cancel_futures=True)
                for child in psutil.Process().children():
                    child.terminate()
                raise


def states(folder: Path) -> dict[str, dict[str, Any]]:
    """How each part ended last, by name: "state" is done, failed, or cut (by the end of the time)."""
    return {row.pop("part"): row for row in read_lines(folder / STATE, must_exist=False)}


def attempt(part: Part, folder: Path, deadline: float) -> None:
    """Run the part, unless it is done or has too little time left."""
    left = deadline - time.monotonic()
    if left < LEAST or states(folder).get(part.name, {}).get("state") == "done":
        return
    print(f"{part.name}: running", flush=True)
    began = time.monotonic()
    row = {"part": part.name, **run(part, folder, left), "seconds": round(time.monotonic() - began)}
    add_line(folder / STATE, row)
    print(", ".join(map(str, row.values())), flush=True)


def run(part: Part, folder: Path, left: float) -> dict[str, Any]:
    """One try of a part in a process of its own, for at most ``left`` seconds."""
    number = len(logs(part, folder)) + 1
    out, log = folder.resolve() / f"{part.label}.{number}", folder / f"{part.label}.{number}.log"
    command = [sys.executable, "-m", *(word.replace("OUT.", f"{out}.") for word in part.command)]
    env = {"VLLM_LOGGING_LEVEL": "INFO", turns.FILE: f"{folder / 'turns'}", CELLS: f"{out}.jsonl"}
    process = processes.start(command, cwd=arms.ROOT, env=arms.environment(env | part.env), log=log)
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
    return {"state": "failed", "error": processes.failure_reason(log)}


def logs(part: Part, folder: Path) -> list[Path]:
    """Of its tries, the last one first."""
    return sorted(folder.glob(f"{part.label}.*.log"), key=lambda log: -log.stat().st_mtime)


def best(part: Part, folder: Path) -> list[dict[str, Any]]:
    """The cells or tests of the try that is done, or else of the one that got furthest."""
    tries = [[*read_lines(log.with_suffix(".jsonl"), must_exist=False)] for log in logs(part, folder)]
    is_done = states(folder).get(part.name, {}).get("state") == "done"
    return tries[0] if is_done else max(tries, key=len, default=[])


TEST: dict[str, str] = {}  # of the test that runs, its first failure, or why it is skipped


def pytest_configure() -> None:
    turns.share()


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "setup":
        TEST.clear()
    if not (report.passed or TEST):
        message = getattr(getattr(report.longrepr, "reprcrash", report.longrepr), "message", str(report.longrepr))
        TEST.update(outcome=report.outcome, message=message[:2000])
    if report.when == "teardown":
        test = {"name": report.nodeid.rpartition("::")[2], "outcome": "passed", **TEST}
        arms.keep(test | {name: str(value) for name, value in report.user_properties})
