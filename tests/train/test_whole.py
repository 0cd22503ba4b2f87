"""From prompts to a checked head, by the command that a user runs, killed at random points."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.models import TARGET, heldout
from tests.support.serving import environment
from tests.train.runs import ENGINE

PROMPTS, KILLS = 40, 6
SETTINGS: dict[str, dict[str, Any]] = {
    "data": {"held_out": 8, "max_tokens": 32},
    "head": {"layers": 2, "depths": 4, "aux_layers": [2, 5, 7]},
    "step": {"tokens": 256, "dtype": "float32"},
    "optimizer": {"steps": 12, "lr": 0.001},
    "every": {"checkpoint": 4, "replay": 4},
    "engine": ENGINE,
    "speculators": {"num_workers": 0, "log_freq": 1},
}


def settings(folder: Path) -> Path:
    """peagle.yaml in ``folder``, with its prompts."""
    folder.mkdir()
    rows = (json.dumps({"text": text}) + "\n" for text in heldout()[:PROMPTS])
    (folder / "prompts.jsonl").write_text("".join(rows))
    data = {**SETTINGS["data"], "prompts": ["prompts.jsonl"]}
    file = folder / "peagle.yaml"
    file.write_text(yaml.safe_dump({"target": str(TARGET), **SETTINGS, "data": data}))
    return file


def begin(file: Path) -> subprocess.Popen:
    with (file.parent / "log").open("ab") as out:
        command = [sys.executable, "-m", "peagle_tools.cli", "train", "pipeline", str(file)]
        return subprocess.Popen(command, stdout=out, stderr=out, env=environment(), start_new_session=True)


def written(file: Path) -> dict[str, Any]:
    """A digest of each file that two runs share; speculators' own notes hold times, and Arrow's a cache key."""
    run = file.parent / "run"
    kept = [run / name for name in ("prompts.jsonl", "answers.jsonl", "al.jsonl", "data/token_freq.pt")]
    kept += [*run.glob("data/*.arrow"), *run.glob("data/hidden_states/*"), *run.glob("checkpoints/step-*/*")]
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in kept}


@pytest.mark.full
def test_killed_at_random_points_it_ends_with_the_same_files(tmp_path: Path) -> None:
    """kill -9 of the pipeline alone: its steps and servers end with it, and the same command continues."""
    smooth, killed = settings(tmp_path / "smooth"), settings(tmp_path / "killed")
    began = time.monotonic()
    assert begin(smooth).wait() == 0, (smooth.parent / "log").read_text()
    whole, points = time.monotonic() - began, random.Random(0)
    unfinished = 0
    for _ in range(KILLS):
        process = begin(killed)
        try:
            process.wait(points.uniform(1, 0.2 * whole))
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            unfinished += 1
    print(f"killed {unfinished} times before it was finished")
    assert begin(killed).wait() == 0, (killed.parent / "log").read_text()
    assert written(killed) == written(smooth)
