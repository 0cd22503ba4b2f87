"""``benchmarks.gpu_day`` with three stand-ins for parts: ``python -m tests.benchmarks.standin.day FOLDER``.

The second one waits for FOLDER/go.
"""

import sys
from pathlib import Path

from benchmarks.gpu_day.parts import JSON, Part
from benchmarks.gpu_day.running import run_parts

PART = "tests.benchmarks.standin.part"


def part(folder: Path, name: str, *what: str, limit: float = 60, needs: tuple[str, ...] = ()) -> Part:
    return Part("host", name, (PART, str(folder / "ran"), name, JSON, *what), limit, needs=needs)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    waiting = part(folder, "second", "waits", str(folder / "go"))
    run_parts([part(folder, "first"), waiting, part(folder, "third")], folder / "results")
