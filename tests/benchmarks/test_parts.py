"""A rung's parts with stand-ins: killed, resumed, cut off, side by side."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

import benchmarks.parts
from benchmarks import turns
from benchmarks.arms import ROOT, call
from benchmarks.page import page
from benchmarks.parts import PYTEST, STATE, Part, best, run_parts

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
from tests.benchmarks.test_parts import parts
folder = Path(sys.argv[1])
benchmarks.parts.run_parts([[part] for part in parts(folder)], folder / "results")
"""


def killed_once_finished(folder: Path, part: Part) -> dict:
    """The state that a driver leaves which is killed once this part has finished something."""
    command, results = [sys.executable, "-c", DRIVER, str(folder)], folder / "results"
    driver = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not best(part, results):
        assert time.monotonic() < deadline and driver.poll() is None, "the part never finished anything"
        time.sleep(0.05)
    driver.kill()
    driver.wait()
    return json.loads((results / STATE).read_text())


def cells(go: str):
    """Two, the second one once ``go`` is there."""
    yield {"cell": 1}
    while not Path(go).exists():
        time.sleep(0.05)
    yield {"cell": 2}


def parts(folder: Path) -> list[Part]:
    (folder / "test_it.py").write_text(TESTS.format(go=str(folder / "go-tests")))
    return [
        Part("engine", call(cells, go=str(folder / "go-cells")), 60),
        Part("drafts", (*PYTEST, str(folder / "test_it.py")), 60),
    ]


def test_killed_in_each_part_it_keeps_what_was_finished(tmp_path: Path):
    engine, drafts = parts(tmp_path)
    results = tmp_path / "results"
    for part, go in ((engine, "go-cells"), (drafts, "go-tests")):
        state = killed_once_finished(tmp_path, part)
        assert (state[part.name]["state"], len(best(part, results))) == ("running", 1)
        (tmp_path / go).touch()
    state = run_parts([[engine], [drafts]], results)
    assert (state["engine"]["state"], state["engine"]["tries"]) == ("done", 2)
    assert [cell["cell"] for cell in best(engine, results)] == [1, 2]
    assert (state["drafts"]["state"], len(best(drafts, results))) == ("failed", 2)
    text = page(SimpleNamespace(NOTES="", goals=lambda cells: (), tables=lambda cells: ()), [drafts], results, state)
    assert "drafts: 1 of 2 tests passed, 12 draft rows" in text and "test_two: AssertionError: rows differ" in text


def test_a_slice_or_a_limit_ends_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One that was cut off goes on in less than half of its limit, once."""
    monkeypatch.setattr(benchmarks.parts, "LEAST", 1)
    hangs = call(cells, go=str(tmp_path / "never"))
    for tries, limit in ((1, 3), (2, 100), (2, 100)):
        state = run_parts([[Part("hangs", hangs, limit)]], tmp_path / "results", 2)["hangs"]
        assert (state["state"], state["tries"]) == ("cut", tries)
    assert not run_parts([[Part("long", (), 100)]], tmp_path / "results", 2).get("long")
    state = run_parts([[Part("limited", hangs, 1)]], tmp_path / "results")
    assert state["limited"]["error"] == "took longer than its limit of 1 s"


def test_what_failed_is_tried_again_once(tmp_path: Path):
    broken, fine = Part("broken", ("no_such_module",)), Part("fine", call(cells, go=str(tmp_path)))
    for tries in (1, 2, 2):
        state = run_parts([[broken], [fine]], tmp_path / "results")
        assert (state["broken"]["state"], state["broken"]["tries"]) == ("failed", tries)
        assert "no_such_module" in state["broken"]["error"]
        assert (state["fine"]["state"], state["fine"]["tries"]) == ("done", 1)


def test_a_group_begins_when_the_one_before_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(benchmarks.parts, "SIDE_BY_SIDE", 3)
    events = []

    def attempt(part: Part, *_: object) -> None:
        events.append(part.name)
        time.sleep(0.2)
        events.append(f"end of {part.name}")

    monkeypatch.setattr(benchmarks.parts, "attempt", attempt)
    run_parts([[Part("a", ()), Part("b", ())], [Part("c", ())]], tmp_path)
    assert {*events[:2]} == {"a", "b"} and events[4:] == ["c", "end of c"]


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
        state = pool.submit(run_parts, [pair], Path(folder))
        while not (tmp_path / "b").exists() or not (tmp_path / "a").exists():
            time.sleep(0.05)
        if not hangs:
            time.sleep(1)
            assert not best(pair[1], Path(folder))
            Path(go).touch()
        ended = state.result()
    assert ended["ready"]["state"] == "done"
    assert ended["starting"]["state"] == ("failed" if hangs else "done")
