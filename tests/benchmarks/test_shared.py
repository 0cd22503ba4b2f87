"""What the scripts share: environments, tables, draft steps, a rung's parts, the committed heads and their figures."""

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import numpy as np
import psutil
import pytest

import benchmarks.parts
from benchmarks import arms, real, timing, turns
from benchmarks.arms import call
from benchmarks.kernels import moved_bytes
from benchmarks.page import page
from benchmarks.parts import PYTEST, Part, best, run_parts, states
from benchmarks.shapes import HeadShape
from peagle_kernels.layout import DraftBatch


def test_nothing_of_another_arms_environment_is_inherited(monkeypatch):
    monkeypatch.setenv("PEAGLE_VLLM_DISABLE", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    env = arms.environment(arms.V1)
    assert env["VLLM_USE_V2_MODEL_RUNNER"] == "0" and not {"PEAGLE_VLLM_DISABLE", "TRITON_INTERPRET"} & env.keys()


def test_a_table_shows_every_cell():
    """A summary by its median and spread; a key that only some cells have is empty in the others."""
    cells = [{"arm": "a", "us": arms.summary([1.0, 2.0, 3.0])}, {"arm": "other", "bytes": 12345}]
    lines = ["arm    us       bytes", "a      2 (1-3)", "other           12,345"]
    assert arms.table(cells).splitlines() == lines


def test_on_a_gpu_a_step_is_queued_behind_other_work(monkeypatch):
    cuda = MagicMock()
    cuda.Event.return_value.elapsed_time.return_value = 0.5  # milliseconds
    monkeypatch.setattr(timing.torch, "cuda", cuda)
    for name, value in {"HAS_GPU": True, "STEPS": 1, "WARM": 1}.items():
        monkeypatch.setattr(timing, name, value)
    drafter = SimpleNamespace(propose=cuda.propose)
    with timing.watched(drafter, batch=2, k=3) as steps:
        for _ in range(3):
            drafter.propose(decode(2, 4))
    assert steps.device == [500.0] and len(steps.host) == 1
    order = [name for name, _, _ in cuda.mock_calls if name not in ("Event", "Event().elapsed_time")]
    behind = ["_sleep", "Event().record", "propose", "Event().record"]
    assert order == ["propose", *behind, "synchronize", "propose", "synchronize"]


def decode(batch: int, rows: int):
    """``propose``'s first argument on V2."""
    return SimpleNamespace(num_reqs=batch, num_scheduled_tokens=np.full(batch, rows))


def test_too_few_steps_are_an_error():
    """The rehearsals see both kinds of step on both runners."""
    drafter = SimpleNamespace(propose=lambda input_batch: None)
    few = timing.watched(drafter, batch=2, k=3)
    with pytest.raises(RuntimeError, match="with all 2 requests: 6 more are needed"), few:
        drafter.propose(decode(1, 4))  # not full
        drafter.propose(decode(2, 4))


def test_a_draft_step() -> None:
    """Two requests, three drafts each. Hidden 4, MLP 8, two query heads and one KV head of 2, 10 tokens."""
    attention = 4 * 4 + 2 * 4 * 2 + 4 * 4  # q, k and v, o; the first layer's q, k and v are twice as wide
    layers = (attention + 4 * 4 + 2 * 4 * 2) + 3 * attention + 4 * (3 * 4 * 8)
    hidden_states = 2 * 4 * 12 + 2 * 6 * 4  # K+1 rows of fc, 2K rows of the layers
    moved = HeadShape(4, 8, 2, 1, 2, 10).step_bytes(3, 2, parallel=True)
    assert moved == 2 * (12 * 4 + layers + 10 * 4 + hidden_states)


def test_kernels() -> None:
    """K = 1, two requests of two rows: 4 rows are read and staged; each request has 2 draft rows and a sample."""
    indices = 4 * 12 + 4 * 28 + 2 * 24
    moved = ((4 + 4) * 3 * 20 + indices, (4 + 1 + 4) * 20 + 4 * 4)
    assert moved_bytes(DraftBatch(2, 4, 1, 4, 2), row=20) == moved


# That of EAGLE-3's head guards stock vLLM's drafter.
@pytest.mark.parametrize("head", ["peagle", pytest.param("eagle3", marks=pytest.mark.full)])
def test_drafts_are_those_of_the_record(head: str) -> None:
    """Those of `make real-heads`; the target is of `make real-target`."""
    assert real.TARGET.is_dir(), "make real-target"
    record = json.loads((real.HEADS / head / "training.json").read_text())["drafts"]
    drafts = real.greedy_drafts(real.HEADS / head)
    assert drafts["output_tokens"] == record["output_tokens"] == 256
    assert drafts["acceptance"] == pytest.approx(record["acceptance"])
    assert drafts["acceptance_length"] > 1.2


def test_acceptance_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(real, "KEPT", tmp_path / "kept.jsonl")
    started = Mock(side_effect=lambda *_: {"drafter": "", "sets": started.call_count})
    monkeypatch.setattr(real, "in_own_process", started)
    for _ in range(2):
        assert [real.acceptance(arm) for arm in real.ARMS] == [*range(1, len(real.ARMS) + 1)]
    assert [call.args[1] for call in started.call_args_list] == real.ARMS


def test_one_arm_is_measured_beside_others(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["real.py", "--only", "n-gram K=5"])
    real.main()
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["n-gram", "K=5"]]


def test_second_turns_follow_the_kept_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before there are any, an arm's own, which are kept."""
    asked, engine = list[list[list[str]]](), object.__new__(real.Engine)
    output = SimpleNamespace(text="its own", token_ids=[1], spec_decode_metrics=None)
    engine.arm, engine.answer = real.NONE, lambda chats, **_: asked.append(chats) or [output] * len(chats)
    kept = real.first_answers()["mt-bench"]
    assert [cell["first"] for _, cell in engine.acceptance(2)] == [[], []]
    assert [chat[1] for chat in asked[-1]] == [kept[0], kept[40]] and len(kept) == 80
    monkeypatch.setattr(real, "KEPT", tmp_path / "nothing")
    assert [cell["first"] for _, cell in engine.acceptance(2)] == [[], ["its own"] * 2]
    assert [chat[1] for chat in asked[-1]] == ["its own"] * 2


def test_a_head_without_its_selector(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(real, "WORK", tmp_path)
    configs = [arm.speculative_config() for arm in real.ARMS if arm.name.startswith(real.PLAIN)]
    (folder,) = tmp_path.iterdir()
    assert [config["model"] for config in configs] == [str(folder)] * 2
    assert "candidate_selector" not in json.loads((folder / "config.json").read_text())
    assert not list(folder.glob("edge*"))


@pytest.mark.full
def test_heads_are_trained_from_the_committed_text(tmp_path: Path) -> None:
    """`make real-heads` on 24 answers, two steps a head."""
    heads = tmp_path / "heads"
    small = ["--answers", "24", "--steps", "2", "--run", str(tmp_path / "run"), "--out", str(heads)]
    subprocess.run([sys.executable, "models/recipe/real.py", *small], cwd=arms.ROOT, check=True)
    for name in ("peagle", "eagle3"):
        config, record = (json.loads((heads / name / file).read_text()) for file in ("config.json", "training.json"))
        assert ("candidate_selector" in config) == (name == "peagle")
        assert record["drafts"]["output_tokens"] == 256


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
