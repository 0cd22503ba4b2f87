"""A rung's parts with stand-ins: killed, resumed, cut off, side by side; rung 1 as a rehearsal; and the page."""

import itertools
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

import benchmarks.parts
from benchmarks import engine, gpu_day, rung1, turns
from benchmarks.arms import call
from benchmarks.page import from_log, kernels, page
from benchmarks.parts import CELLS, PYTEST, STATE, Part, best, run_parts
from tests.benchmarks.running import ROOT

TESTS = """
import time
from pathlib import Path
def test_one(record_property):
    record_property("rows", 12)
def test_two():
    while not Path({go!r}).exists():
        time.sleep(0.05)
    assert 1 == 2, "rows differ"
"""
DRIVER = """
import sys
from pathlib import Path
import benchmarks.parts
from tests.benchmarks.test_gpu_day import parts
folder, alone = Path(sys.argv[1]), sys.argv[2] == "True"
benchmarks.parts.SIDE_BY_SIDE = 2
benchmarks.parts.run_parts(parts(folder, alone), folder / "results")
"""


def killed_once_finished(folder: Path, running: list[Part], alone: bool) -> dict:
    """The state that a driver leaves which is killed once each of these parts has finished something."""
    command, results = [sys.executable, "-c", DRIVER, str(folder), str(alone)], folder / "results"
    driver = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not all(best(part, results) for part in running):
        assert time.monotonic() < deadline and driver.poll() is None, "a part never finished anything"
        time.sleep(0.05)
    driver.kill()
    driver.wait()
    return json.loads((results / STATE).read_text())


def cells(go: str):
    """Two, the second one once ``go`` is there. Run in a process of its own."""
    yield {"cell": 1}
    while not Path(go).exists():
        time.sleep(0.05)
    yield {"cell": 2}


def parts(folder: Path, alone: bool = True) -> list[Part]:
    (folder / "test_it.py").write_text(TESTS.format(go=str(folder / "go-tests")))
    return [
        Part("engine", call(cells, CELLS, go=str(folder / "go-cells")), 60, alone=alone),
        Part("drafts", (*PYTEST, str(folder / "test_it.py")), 60, alone=alone),
    ]


def test_killed_in_each_part_it_keeps_what_was_finished(tmp_path: Path):
    engine, drafts = parts(tmp_path)
    results = tmp_path / "results"
    for part, go in ((engine, "go-cells"), (drafts, "go-tests")):
        state = killed_once_finished(tmp_path, [part], alone=True)
        assert (state[part.name]["state"], len(best(part, results))) == ("running", 1)
        (tmp_path / go).touch()
    state = run_parts([engine, drafts], results)
    assert (state["engine"]["state"], state["engine"]["tries"]) == ("done", 2)
    assert [cell["cell"] for cell in best(engine, results)] == [1, 2]
    assert (state["drafts"]["state"], len(best(drafts, results))) == ("failed", 2)
    text = page(SimpleNamespace(NOTES="", goals=lambda cells: (), tables=lambda cells: ()), [drafts], results, state)
    assert "drafts: 1 of 2 tests passed, 12 draft rows" in text and "test_two: AssertionError: rows differ" in text


def test_killed_while_parts_run_side_by_side_each_keeps_what_was_finished(tmp_path: Path):
    both = parts(tmp_path, alone=False)
    state = killed_once_finished(tmp_path, both, alone=False)
    for part in both:
        assert (state[part.name]["state"], len(best(part, tmp_path / "results"))) == ("running", 1)


def test_a_slice_or_a_limit_ends_a_part(tmp_path: Path):
    """Two cuts give it up."""
    hangs = call(cells, CELLS, go=str(tmp_path / "never"))
    for expected in ("cut", "cut", "failed"):
        assert run_parts([Part("hangs", hangs, 3)], tmp_path / "results", 2)["hangs"]["state"] == expected
    assert not run_parts([Part("long", (), 100)], tmp_path / "results", 2).get("long")
    state = run_parts([Part("limited", hangs, 1)], tmp_path / "results")
    assert state["limited"]["error"] == "took longer than its limit of 1 s"


def test_what_failed_is_tried_again_once(tmp_path: Path):
    broken, fine = Part("broken", ("no_such_module",)), Part("fine", call(cells, CELLS, go=str(tmp_path)))
    for tries in (1, 2, 2):
        state = run_parts([broken, fine], tmp_path / "results")
        assert (state["broken"]["state"], state["broken"]["tries"]) == ("failed", tries)
        assert "no_such_module" in state["broken"]["error"]
        assert (state["fine"]["state"], state["fine"]["tries"]) == ("done", 1)


def meet(mine: str, other: str):
    """A cell once the other part is there, too. Run in a process of its own."""
    Path(mine).touch()
    while not Path(other).exists():
        time.sleep(0.05)
    yield {"cell": 1}


def test_neighbours_that_time_nothing_run_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(benchmarks.parts, "SIDE_BY_SIDE", 2)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    commands = (call(meet, CELLS, mine=a, other=b), call(meet, CELLS, mine=b, other=a))
    pair = [Part(name, command, 60, alone=False) for name, command in zip("ab", commands, strict=True)]
    assert {entry["state"] for entry in run_parts(pair, tmp_path / "results").values()} == {"done"}


def test_a_wave_begins_when_the_one_before_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(benchmarks.parts, "SIDE_BY_SIDE", 3)
    events = []

    def attempt(part: Part, *_: object) -> None:
        events.append(part.name)
        time.sleep(0.2)
        events.append(f"end of {part.name}")

    monkeypatch.setattr(benchmarks.parts, "attempt", attempt)
    run_parts([Part(name, (), alone=False, wave=wave) for name, wave in (("a", 0), ("b", 0), ("c", 1))], tmp_path)
    assert {*events[:2]} == {"a", "b"} and events[4:] == ["c", "end of c"]


def starts_and_times(mine: str, go: str, seconds: int):
    """A cell once the device is its own. Run in a process of its own."""
    turns.share(seconds)
    Path(mine).touch()
    while not Path(go).exists():
        time.sleep(0.05)
    turns.have_to_itself(60)
    yield {"cell": 1}


@pytest.mark.parametrize("hangs", [False, True])
def test_what_is_timed_waits_for_what_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool):
    """ "ready" goes on once "starting" has begun to start, and is timed once that, too, is ready, or was ended."""
    monkeypatch.setattr(benchmarks.parts, "SIDE_BY_SIDE", 3)
    a, b, go, folder = (str(tmp_path / name) for name in ("a", "b", "go", "results"))
    starting = call(starts_and_times, CELLS, mine=a, go=go, seconds=2 if hangs else 0)
    ready = call(starts_and_times, CELLS, mine=b, go=a, seconds=0)
    pair = [Part("starting", starting, 60, alone=False), Part("ready", ready, 60, alone=False)]
    with ThreadPoolExecutor() as pool:
        state = pool.submit(run_parts, pair, Path(folder))
        while not (tmp_path / "b").exists() or not (tmp_path / "a").exists():
            time.sleep(0.05)
        if not hangs:
            time.sleep(1)
            assert not best(pair[1], Path(folder))
            Path(go).touch()
        ended = state.result()
    assert ended["ready"]["state"] == "done"
    assert ended["starting"]["state"] == ("failed" if hangs else "done")


def test_a_rehearsal(tmp_path: Path):
    """Rung 1 whole, its page and its archive; then again, where nothing is left to do."""
    command = [sys.executable, "-m", "benchmarks.gpu_day", "1", "--seconds", "600", "--out", str(tmp_path)]
    env = os.environ | {"PEAGLE_COMMIT": "the copied one"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "page-1.txt").read_text()
    for part in rung1.parts():
        assert re.search(rf"^{re.escape(part.name)}: done, 1, \d+$", done.stdout, re.M)
    assert "not done" not in text and "not measured" in text  # 64 requests
    assert re.search(r"^MISSED: tokens/s over EAGLE-3 K=3, V2 at 1 is ", text, re.M)
    assert "drafts CPU_ATTN eager: 8 of 8 tests passed" in text
    result = json.loads((tmp_path / "rung-1.json").read_text())
    assert result["commit"] == "the copied one" and "samples" not in str(result["cells"])
    assert {len(tests) for tests in result["tests"].values()} == {2, 8}
    with tarfile.open(tmp_path / "rung-1.tar.gz") as archive:
        assert {f"rung-1/{name}" for name in ("page-1.txt", STATE, "kernels.1.json", "kernels.1.log")} <= {
            *archive.getnames()
        }
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0 and ": running" not in again.stdout


def test_only_parts_that_there_are(tmp_path: Path):
    """Also behind the options, where a GPU host's script has them."""
    for where in (["1", "engine"], ["1", "--seconds", "9", "--out", str(tmp_path), "engine"]):
        refused = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu_day", *where], cwd=ROOT, capture_output=True, text=True
        )
        assert refused.returncode == 1
        assert refused.stderr.startswith("no such part: engine; there are: drafts CPU_ATTN eager")


def test_goals():
    figures = (
        (engine.OURS, 1, 500),
        (engine.STOCK_PEAGLE, 1, 390),
        (engine.OURS, 64, 900),
        (engine.STOCK_PEAGLE, 64, 850),
    )
    cells = [{"arm": arm, "c": c, "tokens_per_second": {"median": speed}} for arm, c, speed in figures]
    cells.append({"arm": engine.OURS, "c": 1, "/ roofline": 1.2})
    cells.append({"kernel": "gather_hidden", "rows": 8192, "width": 2880, "of_copy_bandwidth": 0.7})
    assert [str(goal).partition(":")[0] for goal in rung1.goals(cells)] == [
        *("met", "MISSED", "not measured", "not measured", "met", "MISSED")
    ]


def test_the_page_reads_logs_and_compiled_kernels(tmp_path: Path):
    part = Part("engine one", ())
    (tmp_path / "engine-one.1.log").write_text(
        "INFO [cuda.py:1] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].\n"
        "WARNING GPU<->CPU sync detected - avoid it\n"
        "WARNING 11-26 03:00:00 [jit_monitor.py:140] Triton JIT compile during inference: _walk_kernel (x). T\n"
    )
    entries = [{"kernel": "_walk", "seconds": 1.25, "cached": False}, {"kernel": "_walk", "seconds": 0, "cached": True}]
    (tmp_path / "engine-one.1.compiled").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    lines = [*kernels(tmp_path), *from_log(part, tmp_path)]
    assert lines[1:] == [
        "  _walk: 1 compiled, 1.2 s; 1 from the cache",
        "log of engine one: Triton JIT compile during inference: _walk_kernel (x); Using FLASH_ATTN attention backend; "
        "1 x GPU<->CPU sync detected",
    ]


@pytest.mark.parametrize("has_gpu", [True, False])
def test_what_would_run(has_gpu: bool):
    """Every engine whose drafts are compared checks for waits, none that is timed, and no two parts share a file.

    On a GPU host, which gives a rung 430 seconds, the first engine is still measured where a part beside it hangs, and
    no three engines start at the same time.
    """
    code = f"""
import torch
torch.cuda.is_available = lambda: {has_gpu}
import os
os.cpu_count = lambda: 16
import json
from benchmarks import rung1
from benchmarks.parts import CELLS, TESTS
kept = {{CELLS, TESTS}}
print(json.dumps([(p.name, p.label, p.limit, p.env, p.alone, len(kept & {{*p.command}})) for p in rung1.parts()]))
"""
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = json.loads(printed.splitlines()[-1])
    assert len({label for _, label, *_ in listed}) == len(listed)
    for name, _, _, env, alone, num_files in listed:
        assert num_files == 1  # what it finishes is kept, in one of the two ways that the tests above kill
        assert alone == (name in ("kernels", "sampled rows") or "compiled" in name)
        assert ("VLLM_GPU_SYNC_CHECK" in env) == (name.startswith("drafts") and "compiled" not in name)
        assert ("VLLM_MOE_ROUTING_SIMULATION_STRATEGY" in env) == name.startswith("engine")
    assert len([name for name, *_ in listed if name.startswith("drafts")]) == (6 if has_gpu else 1)
    if has_gpu:
        hang = max(
            limit for name, _, limit, *_ in listed if name.startswith(("drafts", "exact")) and "comp" not in name
        )
        engine_limit = min(limit for name, _, limit, *_ in listed if name.startswith("engine"))
        assert hang + engine.TIMED_SECONDS <= engine_limit <= 430 - gpu_day.RESERVE
        for _, group in itertools.groupby(listed, key=lambda entry: entry[4]):
            assert len([name for name, *_ in group if name.startswith("engine")]) <= 2
