"""A GPU's first half hour with stand-ins for its parts: killed, resumed, cut off; what it would run; its page."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import engine
from benchmarks.gpu_day import page as pages
from benchmarks.gpu_day import running
from benchmarks.gpu_day.parts import PYTEST, Part
from benchmarks.gpu_day.running import FILE, LOG, read, run_parts
from tests.benchmarks.running import ROOT
from tests.benchmarks.standin.day import part


def ran(folder: Path) -> list[str]:
    """Names of the stand-ins that were started, in order."""
    return [line.split()[0] for line in (folder / "ran").read_text().splitlines()]


def run(parts: list[Part], folder: Path, **more: Any) -> dict[str, Any]:
    return run_parts(parts, folder / "results", **more)


def left_behind(folder: Path) -> list[str]:
    """Process ids of stand-ins that still run."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes()
        except OSError:  # it ended meanwhile
            continue
        if str(folder).encode() in command:
            found.append(file.parent.name)
    return found


def day(folder: Path, name: str) -> list[str]:
    return [sys.executable, "-m", "tests.benchmarks.standin.day", str(folder), "first", name]


@pytest.mark.parametrize(
    ("name", "finished", "whole"),
    [
        ("file", None, ["file"]),
        ("tests", ["test_one"], ["test_one", "test_two"]),
        ("cells", ["one"], ["one", "two"]),
    ],
)
def test_killed_and_resumed(tmp_path: Path, name: str, finished: list[str] | None, whole: list[str]):
    """Killed in each kind of part: what it had finished is kept, it is begun again, and the part before it is not."""
    driver = subprocess.Popen(day(tmp_path, name), cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline, known = time.monotonic() + 120, {}

    def result() -> list[str] | None:
        return None if "result" not in known[name] else [*known[name]["result"]]

    while name not in known or result() != finished:
        assert time.monotonic() < deadline, f"the part never came so far: {known}"
        time.sleep(0.05)
        known = read(tmp_path / "results")
    driver.kill()
    driver.wait()
    while left_behind(tmp_path):
        assert time.monotonic() < deadline, "the part outlived its driver"
        time.sleep(0.05)
    known = read(tmp_path / "results")
    assert [known["first"]["state"], known[name]["state"]] == ["done", "running"]
    assert (known["first"]["result"], result()) == (["first"], finished)
    (tmp_path / "go").touch()
    printed = subprocess.run(day(tmp_path, name), cwd=ROOT, capture_output=True, text=True, check=True).stdout
    known = read(tmp_path / "results")
    assert (known[name]["state"], result()) == ("done", whole)
    assert "first" not in printed


def test_a_shorter_try_takes_nothing_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = [[1, 2], [1]]
    monkeypatch.setattr(running, "run", lambda *_: {"state": "cut", "result": found.pop(0)})
    for _ in range(3):
        known = run([part(tmp_path, "cells")], tmp_path)
        assert known["cells"]["result"] == [1, 2]
    assert known["cells"]["state"] == "failed"


def test_a_failed_part_is_explained_and_the_next_one_runs(tmp_path: Path, capsys):
    parts = [part(tmp_path, "bad", "fails"), part(tmp_path, "good")]
    known = run(parts, tmp_path)
    assert (known["bad"]["state"], known["bad"]["error"]) == ("failed", "ValueError: no such head")
    assert known["good"]["result"] == ["good"]
    assert re.search(r"bad: failed in \d+ s: .*no such head", capsys.readouterr().out)
    assert "no such head" in (tmp_path / "results" / LOG).read_text()
    run(parts, tmp_path)
    assert ran(tmp_path) == ["bad", "good"]
    run(parts, tmp_path, retry=True)
    assert ran(tmp_path) == ["bad", "good", "bad"]
    files = sorted(file.name for file in (tmp_path / "results").iterdir() if file.is_file())
    assert len(files) <= 8  # what some hosts give back
    assert not [name for name in files if name.endswith(".partial")]


def test_a_part_with_another_command_is_another_part(tmp_path: Path):
    run([part(tmp_path, "engine")], tmp_path)
    run([part(tmp_path, "engine", "waits", str(tmp_path))], tmp_path)
    assert ran(tmp_path) == ["engine", "engine"]


def test_limit(tmp_path: Path):
    known = run([part(tmp_path, "hangs", "sleeps", limit=1), part(tmp_path, "next")], tmp_path)
    assert known["hangs"]["state"] == "failed"
    assert "limit of 1 s" in known["hangs"]["error"]
    assert known["next"]["state"] == "done"
    assert not left_behind(tmp_path)


def test_the_end_of_a_slice_cuts_a_part_off(tmp_path: Path):
    entry = running.run(part(tmp_path, "hangs", "sleeps"), tmp_path / "results", left=1)
    assert (entry["state"], entry["error"]) == ("cut", "the slice was over")
    assert not left_behind(tmp_path)


def test_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A part begins where half of its limit is left, and one that two slices cut off is given up."""
    now, began = 0.0, []

    def run_for(part: Part, folder: Path, left: float) -> dict[str, Any]:
        nonlocal now
        began.append((part.name, left))
        if part.name == "hangs":
            now += left
            return {"state": "cut", "seconds": left}
        now += 10
        return {"state": "done", "seconds": 10}

    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(running, "run", run_for)
    limits = {"quick": 100, "hangs": 190, "long": 220, "short": 180}
    parts = [part(tmp_path, name, limit=limit) for name, limit in limits.items()]
    for state in ("cut", "cut", "failed"):
        known = run(parts, tmp_path, seconds=109)
        assert known["hangs"]["state"] == state
    assert began == [("quick", 109), ("hangs", 99), ("hangs", 109), ("short", 109)]
    assert "cut off 2 times" in known["hangs"]["error"]
    assert "long" not in known


def test_what_is_not_installed_is_named(tmp_path: Path):
    needy = part(tmp_path, "needy", needs=("json", "no_such_module"))
    known = run([needy], tmp_path)
    assert known["needy"]["error"] == "needs no_such_module, not installed here"
    assert not (tmp_path / "ran").exists()
    mended = part(tmp_path, "needy", needs=("json",))
    assert run([mended], tmp_path)["needy"]["state"] == "done"


def test_results_of_another_script_are_refused(tmp_path: Path):
    (tmp_path / FILE).write_text("[1]")
    with pytest.raises(SystemExit, match=r"choose another --out"):
        read(tmp_path)


TESTS = """
def test_good(record_property):
    record_property("rows", 12)
def test_bad():
    assert 1 == 2, "rows differ"
"""


def test_tests_are_read_one_by_one(tmp_path: Path):
    (tmp_path / "test_it.py").write_text(TESTS)
    one = Part("drafts", "drafts, X", (*PYTEST, str(tmp_path / "test_it.py")), 60, needs=())
    known = run([one], tmp_path)
    assert known[one.name]["result"]["test_good"] == {"outcome": "passed", "rows": "12"}
    assert known[one.name]["result"]["test_bad"]["outcome"] == "failure"
    assert known[one.name]["error"].startswith("1 of 2 tests failed; test_bad: AssertionError: rows differ")
    line = pages.page([one], known).splitlines()[-6:]
    assert any("NO" in text and "1 of 2 tests; 12 rows" in text for text in line)


AS_ON_A_GPU = """
import torch
torch.cuda.is_available = lambda: True
"""
LIST = (
    AS_ON_A_GPU
    + """
import json
from dataclasses import asdict
from benchmarks.draft_step import ARMS, SHAPES
from benchmarks.gpu_day.parts import all_parts
print(json.dumps({"parts": [asdict(part) for part in all_parts()], "arms": list(ARMS), "heads": list(SHAPES)}))
"""
)
COLLECT = (
    AS_ON_A_GPU
    + """
import sys, pytest
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "tests/gpu"]))
"""
)


def as_on_a_gpu(code: str) -> str:
    """What ``code`` prints where torch reports a GPU."""
    env = os.environ | {"PEAGLE_TEST_ARM": "plugin-v2"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_a_gpu_would_run():
    found = json.loads(as_on_a_gpu(LIST))
    parts: list[dict[str, Any]] = found["parts"]
    kinds = list(dict.fromkeys(one["kind"] for one in parts))
    assert kinds == ["host", "kernels", "drafts", "bandwidth", "draft step", "engine", "training"]
    assert len({one["name"] for one in parts}) == len(parts)
    assert all(one["limit"] <= 480 for one in parts)  # some hosts cut a command off after 600 s
    calls = {kind: [json.loads(one["command"][3]) for one in parts if one["kind"] == kind] for kind in kinds[-3:]}
    steps = calls["draft step"]
    assert {(step["head"], step["k"]) for step in steps} == {("gpt-oss-20b", 5), ("gpt-oss-20b", 7)}
    assert {step["arm"] for step in steps} == {"plugin V2 graph", "stock V1", "EAGLE-3 V2"} <= set(found["arms"])
    served = {one["arm"] for one in calls["engine"]}
    assert all(one["env"]["VLLM_GPU_SYNC_CHECK"] == "error" for one in parts if one["kind"] in ("drafts", "engine"))
    assert {"none", "EAGLE-3 K=3", "stock P-EAGLE K=7, V1", engine.OURS} <= served <= set(engine.ARMS)
    assert {"arm": "partition", "tokens": 20_480, "sampling": "all depths"} in calls["training"]
    collected = as_on_a_gpu(COLLECT)
    for one in (one for one in parts if one["kind"] == "drafts"):
        backend, mode = one["command"][-1].split(" and ")
        assert collected.count(f"test_drafts[{backend}-{mode}-") == 3


def decode(arm: str, us: float) -> dict[str, Any]:
    calls = {"kernel_launches": 1, "graph_launches": 1, "copies": 0}
    times = {kind: {"median": us} for kind in ("device_us", "idle_us", "host_us")}
    return {"arm": arm, "head": "h", "k": 7, "batch": 1, **times, "launches": calls, "bytes": 1e8}


def test_page(monkeypatch: pytest.MonkeyPatch):
    """Ratios by hand: 300 us over 600 and 400, and over a floor of 1e8 bytes at 1e12 bytes a second, 100 us."""
    for module in (engine, pages):
        monkeypatch.setattr(module, "HAS_GPU", True)
    times = {"plugin V2 graph": 300.0, "stock V1": 600.0, "EAGLE-3 V2": 400.0}
    speeds = {engine.OURS: 200.0, "stock P-EAGLE K=7, V1": 160.0, "EAGLE-3 K=3": 100.0}
    results: dict[tuple[str, str], Any] = {
        ("host", "host"): {"device": "a GPU", "versions": {"vllm": "1"}, "commit": "c" * 40, "bandwidth": 1e12},
        **{("draft step", arm): [decode(arm, us)] for arm, us in times.items()},
        **{
            ("engine", arm): [{"arm": arm, "c": 1, "tokens_per_second": [speed], "acceptance_length": None}]
            for arm, speed in speeds.items()
        },
    }
    parts = [Part(kind, name, (), 1) for kind, name in results] + [Part("drafts", "drafts, F eager", (), 1)]
    known = {name: {"state": "done", "result": result} for (_, name), result in results.items()}
    text = pages.page(parts, known)
    assert "a GPU; vllm 1; commit cccccccccccc\n7 of 8 parts done" in text
    (step,) = (line for line in text.splitlines() if line.startswith("h ") and "plugin V2 graph" in line)
    assert step.split()[6:] == ["300.0", "300.0", "300.0", "1k+1g+0c", "100.0", "100.0", "3.00x"]
    for line in ("of stock V1 0.5, aim 0.5: met", "of EAGLE-3 V2 0.75\n", "of the floor 3.0, aim 1.3: missed"):
        assert f"h K=7 B=1: {line}" in text
    assert "over stock P-EAGLE, c=1: 1.25x, aim >= 1.25: met" in text
    (speed,) = (line for line in text.splitlines() if line.startswith("EAGLE-3 K=3"))
    assert speed.split()[2:] == ["1", "100.0", "(100-100)", "2.00x", "-"]
    assert "drafts, F eager: not run yet" in text
    assert "of the floor" not in pages.page(parts, known | {"host": {"state": "failed", "error": "no copy"}})
