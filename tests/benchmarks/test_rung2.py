"""Rung 2 of ``benchmarks.gpu_day`` as a rehearsal; its goals; what it runs on a GPU; what it says without models."""

import itertools
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks import gpu_day, real_gpu, rung2
from tests.benchmarks.running import ROOT


def test_a_rehearsal(tmp_path: Path) -> None:
    """The page and the archive hold acceptance, tokens/s, and what a server was like."""
    command = [sys.executable, "-m", "benchmarks.gpu_day", "2", "--seconds", "600", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "page-2.txt").read_text()
    for part in rung2.parts():
        assert re.search(rf"^{re.escape(part.name)}: done, 1, \d+$", done.stdout, re.M)
    assert "not done" not in text and "not measured" in text  # 64 requests
    assert re.search(
        r"^(met|MISSED): acceptance length of P-EAGLE K=3 on mt-bench, a CPU's lower bound is ", text, re.M
    )
    assert re.search(r"^MISSED: tokens/s on humaneval at 1: P-EAGLE K=3 over EAGLE-3 K=2 or EAGLE-3 K=3 is", text, re.M)
    header, values = re.search(r"^a server, milliseconds:\n(.*)\n(.*)\n", text, re.M).groups()
    latencies = dict(zip(re.split(r"  +", header), re.split(r"  +", values), strict=True))
    assert latencies["arm"] == rung2.OURS
    assert all(float(latencies[name]) > 0 for name in ("p50_ttft_ms", "p99_ttft_ms", "p99_itl_ms", "start_seconds"))
    with tarfile.open(tmp_path / "rung-2.tar.gz") as archive:
        assert {f"rung-2/server-P-EAGLE-K-3.1.server{end}.log" for end in ("", "-client")} <= {*archive.getnames()}


def cell(arm: str, name: str, c: int, speed: float) -> dict:
    return {"arm": arm, "set": name, "c": c, "tokens_per_second": {"median": speed}}


def test_goals() -> None:
    """EAGLE-3's faster K counts, and the better one of what full batches may be served with."""
    low, high = real_gpu.on_cpu(real_gpu.ARMS[rung2.OURS], "humaneval")
    assert 1.6 < low < high < 1.8  # as README has it
    cells = [
        {"arm": rung2.OURS, "set": "humaneval", "al": (low + high) / 2},
        {"arm": rung2.OURS, "set": "mt-bench", "al": 1.2},
        *(cell(arm, "humaneval", 1, speed) for arm, speed in zip(rung2.EAGLE3, (100, 90), strict=True)),
        cell(rung2.OURS, "humaneval", 1, 115),
        cell(rung2.LOOKUP, "humaneval", 1, 125),
        cell(rung2.NONE, "mt-bench", 64, 100),
        *(cell(arm, "mt-bench", 64, speed) for arm, speed in zip(rung2.FOR_FULL_BATCHES, (80, 101), strict=True)),
    ]
    assert [str(goal).partition(":")[0] for goal in rung2.goals(cells)] == [
        *("met", "met", "MISSED", "met"),
        *("MISSED", "not measured", "met", "not measured", "not measured", "met"),
    ]


def test_times_no_speculation_are_of_the_same_set_and_concurrency() -> None:
    cells = [cell(rung2.NONE, "mt-bench", c, 100 * c) for c in (1, 8)] + [cell("n-gram K=5", "mt-bench", 8, 400)]
    sampled = cell("EAGLE-3, sampled K=3", "mt-bench", 8, 400) | {"temperature": 1.0}
    speeds = dict(rung2.tables([*cells, sampled]))["tokens/s"]
    assert [row.get("/ none") for row in speeds] == [1.0, 1.0, 0.5, None]


def test_second_turns_follow_the_answers_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_gpu, "HAS_GPU", True)
    assert {name: len(answers) for name, answers in real_gpu.first_answers().items()} == {
        "humaneval": 0,
        "mt-bench": 80,
    }


def test_a_missing_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_gpu, "PROMPTS", ROOT / ".cache/nowhere")
    for part in (real_gpu.run_arm(rung2.OURS), real_gpu.serve(rung2.OURS, "log")):
        with pytest.raises(SystemExit, match=r"^\.cache/nowhere is not here: `make real-target`, or carry it along$"):
            next(part)


def test_what_would_run_on_a_gpu() -> None:
    """Every arm, on Model Runner V2 but stock P-EAGLE. All that should start together do, within 330 seconds."""
    code = """
import torch
torch.cuda.is_available = lambda: True
import os
os.cpu_count = lambda: 16
os.environ.pop("OMP_NUM_THREADS", None)
import json
from benchmarks import parts, real_gpu, rung2
listed = [(part.name, part.label, part.limit, part.env, part.wave) for part in rung2.parts()]
assert all(parts.CELLS in part.command for part in rung2.parts())  # what it finishes is kept, whoever is killed
configs = {name: arm.speculative_config() for name, arm in real_gpu.ARMS.items()}
stages = real_gpu.START_SECONDS + real_gpu.TIMED_SECONDS
print(json.dumps([listed, configs, [*real_gpu.ARMS], parts.SIDE_BY_SIDE, stages]))
"""
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed, configs, names, side_by_side, stages = json.loads(printed.splitlines()[-1])
    assert {name.removeprefix("engine ") for name, *_ in listed if name.startswith("engine ")} == {*names}
    assert len({label for _, label, *_ in listed}) == len(listed)
    for name, _, limit, env, _ in listed:
        assert env["VLLM_USE_V2_MODEL_RUNNER"] == ("0" if "stock V1" in name else "1") and "TRITON_INTERPRET" not in env
        assert ("PEAGLE_VLLM_DISABLE" in env) == ("stock" in name or "P-EAGLE" not in name)
        assert env["OMP_NUM_THREADS"] == "1"
        assert limit <= 330 - gpu_day.RESERVE
    assert stages <= min(limit for *_, limit, _, wave in listed if wave == 0)
    assert all(len([*group]) <= side_by_side for _, group in itertools.groupby(listed, key=lambda entry: entry[4]))
    assert {name: config.get("draft_sample_method") for name, config in configs.items() if "sampled" in name} == {
        "P-EAGLE, sampled K=3": "probabilistic",
        "EAGLE-3, sampled K=3": "probabilistic",
    }
    assert [name for name, config in configs.items() if config and config.get("enable_adaptive_verification")] == [
        rung2.FOR_FULL_BATCHES[0]
    ]
