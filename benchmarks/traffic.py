"""Acceptance on the real target before and after a selector was fitted to recorded traffic.

``make real-target`` first. With ``PEAGLE_VLLM_RECORD`` set, an engine answers the first 82 problems of HumanEval.
``peagle-vllm sharpen --from-records`` fits the head's selector to what was recorded, and keeps a fifth of it aside.
Then both heads answer the other 82 problems and MT-Bench, of which ``sharpen`` has seen nothing. What each step made is
kept in .cache/real-bench/traffic, and a killed run goes on from there; remove that folder after a change.
"""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks import arms, real
from benchmarks.arms import kept
from benchmarks.engines import sharpen
from benchmarks.real import ENGINE, HEADS, MAX_TOKENS, SETS, TARGET, Engine, RealArm, al_of, answered, gain_of, read_set
from peagle_vllm.patches.record import RECORD

TRAFFIC, RECORDED = 82, 128  # of HumanEval's problems; tokens of an answer
BEFORE = RealArm("P-EAGLE", "peagle", 3, selector=True)
WORK = real.WORK / f"traffic-{BEFORE.digest()}"
RECORDS, OUT = WORK / "records", WORK / "sharpened"


def serve(engine: Engine, folder: str) -> dict[str, Any]:
    """Answer the traffic, and set aside what was recorded: no other prompt, nor the one that warmed up.

    Returns:
        ``acceptance``, of what comes after.
    """
    for file in Path(folder).glob("*.jsonl"):
        file.unlink()
    engine.answer([turns[:1] for turns in read_set("humaneval")[:TRAFFIC]], RECORDED)
    shutil.copytree(folder, f"{folder}.traffic", dirs_exist_ok=True)
    return acceptance(engine, {})


def acceptance(engine: Engine, first: dict[str, list[str]]) -> dict[str, Any]:
    """``Engine.acceptance`` on what is no traffic."""

    def others(name: str, prompts: int | None = None) -> list[list[str]]:
        return read_set(name, prompts)[TRAFFIC if name == "humaneval" else 0 :]

    with patch.object(real, "read_set", others):
        return engine.acceptance(first, None)


def fitted() -> tuple[dict[str, Any], int]:
    """What ``sharpen`` reports, and the seconds that it took."""
    began, options = time.perf_counter(), {"max_tokens": RECORDED, "engine": json.dumps(ENGINE)}
    options |= {"target": TARGET, "from_records": f"{RECORDS}.traffic"}
    report = sharpen(HEADS / str(BEFORE.head), OUT, BEFORE.env, "-k", str(BEFORE.k), **options)
    return report, round(time.perf_counter() - began)


def measure() -> dict[str, Any]:
    WORK.mkdir(parents=True, exist_ok=True)
    with patch.dict(os.environ, {RECORD: str(RECORDS)}):
        old = new = answered(WORK / "before.json", BEFORE, serve, str(RECORDS))
    report, seconds = kept(WORK / "report.json", fitted)
    print(json.dumps(report), seconds, flush=True)
    if OUT.exists():
        sharpened = RealArm("P-EAGLE sharpened", str(OUT), BEFORE.k, selector=True)
        new = answered(WORK / "after.json", sharpened, acceptance, {name: old[name]["first"] for name in SETS})
    sets = {}
    for name in SETS:
        both = [np.asarray(cell[name]["counts"]) for cell in (old, new)]
        found = {"prompts": len(both[0]), "before": al_of(both[0]), "after": al_of(both[1])}
        sets[name] = found | gain_of(both[1], both[0])
        print(name, sets[name], flush=True)
    how: dict[str, Any] = {"head": BEFORE.head, "k": BEFORE.k, "traffic": TRAFFIC, "recorded": RECORDED}
    how |= {"max_tokens": MAX_TOKENS, "engine": ENGINE}
    how |= {"threads": BEFORE.env["OMP_NUM_THREADS"], "written": OUT.exists()}
    return how | {"sharpen": report, "seconds": seconds, "sets": sets}


if __name__ == "__main__":
    arms.main(__doc__, measure)
