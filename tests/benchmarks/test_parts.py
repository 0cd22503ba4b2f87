"""A rung's parts with stand-ins: killed, run again, cut off, side by side."""

import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import benchmarks.parts
from benchmarks import turns
from benchmarks.arms import call
from benchmarks.page import page
from benchmarks.parts import PYTEST, Part, best, run_parts, states

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


def killed_once_finished(part: Part, results: Path) -> None:
    """Run this part, which is killed once it has finished something."""
    with ThreadPoolExecutor() as pool:
        running = pool.submit(run_parts, [[part]], results)
        while not best(part, results):
            assert not running.done(), "the part never finished anything"
            time.sleep(0.05)
        for process in psutil.Process().children():
            if "benchmarks" in str(process.cmdline()):
                process.kill()


def cells(go: str):
    """Two, the second one once ``go`` is there."""
    yield {"cell": 1}
    while not Path(go).exists():
        time.sleep(0.05)
    yield {"cell": 2}


def test_a_part_that_is_killed_keeps_what_it_finished(tmp_path: Path):
    results, file = tmp_path / "results", tmp_path / "test_it.py"
    file.write_text(TESTS.format(go=str(tmp_path / "go")))
    engine = Part("engine", call(cells, go=str(tmp_path / "go")), 60)
    drafts = Part("drafts", (*PYTEST, str(file)), 60)
    for part in (engine, drafts):
        killed_once_finished(part, results)
        assert states(results)[part.name]["state"] == "failed" and len(best(part, results)) == 1
    (tmp_path / "go").touch()
    run_parts([[engine], [drafts]], results)
    state = states(results)
    assert state["engine"]["state"] == "done" and [cell["cell"] for cell in best(engine, results)] == [1, 2]
    assert state["drafts"]["state"] == "failed" and len(best(drafts, results)) == 2
    text = page(SimpleNamespace(NOTES="", goals=lambda cells: (), tables=lambda cells: ()), [drafts], results)
    assert "drafts: 1 of 2 tests passed, 12 draft rows" in text and "test_two: AssertionError: rows differ" in text


def test_a_try_that_passes_replaces_longer_ones(tmp_path: Path):
    results, file = tmp_path / "results", tmp_path / "test_it.py"
    part, count = Part("drafts", (*PYTEST, str(file)), 60), "import pytest\n@pytest.mark.parametrize('n', range({}))\n"
    for number, body in ((3, "assert False"), (2, "pass")):
        file.write_text(count.format(number) + f"def test(n):\n    {body}\n")
        run_parts([[part]], results)
        assert len(best(part, results)) == number
    assert states(results)["drafts"]["state"] == "done"


def two_that_hang(folder: str):
    hangs = call(cells, go=f"{folder}/never")
    run_parts([[Part("a", hangs), Part("b", hangs)]], Path(folder, "results"))
    yield {}


def test_ctrl_c_ends_the_parts(tmp_path: Path):
    """A job in the background starts its children with SIGINT ignored, and they would keep to that."""
    own = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), "cwd": benchmarks.arms.ROOT}
    process = psutil.Popen([sys.executable, "-m", *call(two_that_hang, folder=str(tmp_path))], **own)
    while len(list(tmp_path.glob("results/*.jsonl"))) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) and {row["state"] for row in states(tmp_path / "results").values()} == {"failed"}


def test_a_slice_or_a_limit_ends_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """None begins in less than ``LEAST``."""
    hangs, results = call(cells, go=str(tmp_path / "never")), tmp_path / "results"
    run_parts([[Part("late", hangs)]], results, benchmarks.parts.LEAST - 1)
    run_parts([[Part("limited", hangs, 1)]], results)
    monkeypatch.setattr(benchmarks.parts, "LEAST", 1)
    run_parts([[Part("cut", hangs)]], results, 2)
    state = states(results)
    assert state.keys() == {"limited", "cut"} and state["cut"]["state"] == "cut"
    assert state["limited"]["error"] == "took longer than its limit of 1 s"


def test_what_failed_is_tried_again(tmp_path: Path):
    """What is done is not."""
    broken, fine = Part("broken", ("no_such_module",)), Part("fine", call(cells, go=str(tmp_path)))
    for _ in range(2):
        run_parts([[broken], [fine]], tmp_path / "results")
        state = states(tmp_path / "results")
        assert (state["broken"]["state"], state["fine"]["state"]) == ("failed", "done")
        assert "no_such_module" in state["broken"]["error"]
    assert [len(benchmarks.parts.logs(part, tmp_path / "results")) for part in (broken, fine)] == [2, 1]


def starts_and_times(mine: str, go: str, seconds: int):
    """A cell once the device is its own."""
    turns.share(seconds)
    Path(mine).touch()
    while not Path(go).exists():
        time.sleep(0.05)
    turns.have_to_itself(60)
    yield {"cell": 1}


@pytest.mark.parametrize("hangs", [False, True])
def test_what_is_timed_waits_for_what_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool):
    """They run side by side; "ready" is timed once "starting", too, is ready, or was ended."""
    monkeypatch.setattr(benchmarks.parts, "SIDE_BY_SIDE", 3)
    a, b, go, folder = (str(tmp_path / name) for name in ("a", "b", "go", "results"))
    starting = call(starts_and_times, mine=a, go=go, seconds=2 if hangs else 0)
    ready = call(starts_and_times, mine=b, go=a, seconds=0)
    pair = [Part("starting", starting, 60), Part("ready", ready, 60)]
    with ThreadPoolExecutor() as pool:
        running = pool.submit(run_parts, [pair], Path(folder))
        while not (tmp_path / "b").exists() or not (tmp_path / "a").exists():
            time.sleep(0.05)
        if not hangs:
            time.sleep(1)
            assert not best(pair[1], Path(folder))
            Path(go).touch()
        running.result()
    ended = states(Path(folder))
    assert (ended["ready"]["state"], ended["starting"]["state"]) == ("done", "failed" if hangs else "done")
