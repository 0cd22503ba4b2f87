"""A GPU's first half hour with stand-ins for its parts: killed, resumed, cut off; and its page."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_day
from benchmarks.gpu_day import CELLS, PYTEST, Part, best, run_parts
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
from benchmarks import gpu_day
from tests.benchmarks.test_gpu_day import parts
gpu_day.run_parts(parts(Path(sys.argv[1])), Path(sys.argv[1]) / "results")
"""


def cells(go: str):
    """Two, the second one once ``go`` is there. Run in a process of its own."""
    yield {"cell": 1}
    while not Path(go).exists():
        time.sleep(0.05)
    yield {"cell": 2}


def parts(folder: Path) -> list[Part]:
    (folder / "test_it.py").write_text(TESTS.format(go=str(folder / "go-tests")))
    return [
        Part("engine", gpu_day.call(cells, CELLS, go=str(folder / "go-cells")), 60),
        Part("drafts", (*PYTEST, str(folder / "test_it.py")), 60),
    ]


def test_killed_in_each_part_it_keeps_what_was_finished(tmp_path: Path):
    engine, drafts = parts(tmp_path)
    results = tmp_path / "results"
    for part, go in ((engine, "go-cells"), (drafts, "go-tests")):
        driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], cwd=ROOT, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 240
        while not best(part, results):
            assert time.monotonic() < deadline and driver.poll() is None, "the part never finished anything"
            time.sleep(0.05)
        driver.kill()
        driver.wait()
        state = json.loads((results / gpu_day.STATE).read_text())
        assert (state[part.name]["state"], len(best(part, results))) == ("running", 1)
        (tmp_path / go).touch()
    state = run_parts([engine, drafts], results)
    assert state["engine"] == {"state": "done", "tries": 2}
    assert [cell["cell"] for cell in best(engine, results)] == [1, 2]
    assert (state["drafts"]["state"], len(best(drafts, results))) == ("failed", 2)
    text = gpu_day.page([drafts], results, state)
    assert "drafts: 1 of 2 tests passed, 12 draft rows" in text and "test_two: AssertionError: rows differ" in text


def test_a_slice_or_a_limit_ends_a_part(tmp_path: Path):
    """Two cuts give it up."""
    hangs = gpu_day.call(cells, CELLS, go=str(tmp_path / "never"))
    for expected in ("cut", "cut", "failed"):
        assert run_parts([Part("hangs", hangs, 3)], tmp_path / "results", 2)["hangs"]["state"] == expected
    assert not run_parts([Part("long", (), 100)], tmp_path / "results", 2).get("long")
    state = run_parts([Part("limited", hangs, 1)], tmp_path / "results")
    assert state["limited"]["error"] == "took longer than its limit of 1 s"


def test_what_failed_is_tried_again_once(tmp_path: Path):
    """And where the first part starts nothing, the others are left for the next call."""
    broken, fine = Part("broken", ("no_such_module",)), Part("fine", gpu_day.call(cells, CELLS, go=str(tmp_path)))
    for tries in (1, 2):
        state = run_parts([broken, fine], tmp_path / "results")
        assert (state["broken"]["state"], state["broken"]["tries"], "fine" in state) == ("failed", tries, False)
    assert run_parts([broken, fine], tmp_path / "results")["fine"]["state"] == "done"


@pytest.mark.parametrize("has_gpu", [True, False])
def test_what_would_run(has_gpu: bool):
    """Every engine whose drafts are compared checks for waits, none that is timed, and no two parts share a file."""
    code = f"""
import torch
torch.cuda.is_available = lambda: {has_gpu}
import json
from benchmarks.gpu_day import all_parts
print(json.dumps([(p.name, p.label, p.limit, p.env) for p in all_parts()]))
"""
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = json.loads(printed.splitlines()[-1])
    assert len({label for _, label, _, _ in listed}) == len(listed)
    assert all(("VLLM_GPU_SYNC_CHECK" in env) == name.startswith("drafts") for name, _, _, env in listed)
    assert len([name for name, *_ in listed if name.startswith("drafts")]) == (6 if has_gpu else 1)
    assert any("adaptive" in name for name, *_ in listed) == has_gpu
