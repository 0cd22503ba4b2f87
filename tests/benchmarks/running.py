"""A benchmark script, run as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROVENANCE = {"what", "device", "hardware", "versions", "commit"}


def run_script(name: str, out: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What ``python -m benchmarks.NAME`` prints, and the result that it writes."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(out.read_text())
    assert set(result) >= PROVENANCE
    return done.stdout, result


def is_summary(samples: dict[str, Any], count: int) -> bool:
    """Whether this is ``arms.summary`` of so many samples."""
    return len(samples["samples"]) == count and samples["p10"] <= samples["median"] <= samples["p90"]
