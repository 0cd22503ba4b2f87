"""``benchmarks.gpu_day`` with stand-ins for parts: ``python -m tests.benchmarks.standin.day FOLDER NAME ...``.

All but the first one wait for FOLDER/go; of the tests, and of the cells, one is finished before.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import arms
from benchmarks.gpu_day.parts import JSON, PYTEST, Part
from benchmarks.gpu_day.running import run_parts

PART = "tests.benchmarks.standin.part"
TESTS = """
import time
from pathlib import Path
def test_one(record_property):
    record_property("rows", 12)
def test_two():
    while not Path({go!r}).exists():
        time.sleep(0.05)
"""


def part(folder: Path, name: str, *what: str, limit: float = 60, needs: tuple[str, ...] = ()) -> Part:
    return Part("host", name, (PART, str(folder / "ran"), name, JSON, *what), limit, needs=needs)


def cells(go: str) -> Iterator[str]:
    """Two, the second one once ``go`` is there."""
    yield "one"
    while not Path(go).exists():
        time.sleep(0.05)
    yield "two"


if __name__ == "__main__":
    folder, chosen = Path(sys.argv[1]), sys.argv[2:]
    go, tests = str(folder / "go"), folder / "test_it.py"
    tests.write_text(TESTS.format(go=go))
    parts = [
        part(folder, "first"),
        part(folder, "file", "waits", go),
        Part("drafts", "tests", (*PYTEST, str(tests)), 60, needs=()),
        Part("engine", "cells", arms.call(cells, JSON, go=go), 60, needs=()),
    ]
    run_parts([one for one in parts if one.name in chosen], folder / "results")
