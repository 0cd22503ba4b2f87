"""The rungs of ``benchmarks.gpu_day`` as rehearsals; their goals and pages; what they run on a GPU."""

import itertools
import json
import lzma
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import engine, gpu_day, real_gpu, rung1, rung2, rung3, rung4, train_gpu
from benchmarks.arms import ROOT
from benchmarks.page import from_log, kernels
from benchmarks.parts import STATE, Part
from benchmarks.real import committed
from peagle_tools.train.lines import read_lines, write_lines
from peagle_tools.train.peagle_yaml import Config


def rehearse(number: int, rung: ModuleType, out: Path) -> tuple[str, set[str]]:
    """A whole rung without a GPU: its page, and what its archive holds."""
    command = [sys.executable, "-m", "benchmarks.gpu_day", str(number), "--seconds", "600", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in rung.parts():
        assert re.search(rf"^{re.escape(part.name)}: done, 1, \d+$", done.stdout, re.M)
    page = (out / f"page-{number}.txt").read_text()
    assert "not done" not in page and "not measured" in page  # 64 requests
    with tarfile.open(out / f"rung-{number}.tar.gz") as archive:
        return page, {name.removeprefix(f"rung-{number}/") for name in archive.getnames()}


def test_a_rehearsal_of_rung_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_COMMIT", "the copied one")
    page, archived = rehearse(1, rung1, tmp_path)
    assert re.search(r"^MISSED: tokens/s over EAGLE-3 K=3, V2 at 1 is ", page, re.M)
    assert re.search(r"^drafts CPU_ATTN eager lookup: (\d+) of \1 tests passed, [1-9]", page, re.M)
    result = json.loads((tmp_path / "rung-1.json").read_text())
    assert result["commit"] == "the copied one" and "samples" not in str(result["cells"])
    assert {"page-1.txt", STATE, "kernels.1.json", "kernels.1.log"} <= archived


def test_a_rehearsal_of_rung_2(tmp_path: Path) -> None:
    """The page and the archive hold acceptance, tokens/s, and what a server was like."""
    page, archived = rehearse(2, rung2, tmp_path)
    bound = r"^(met|MISSED): acceptance length of P-EAGLE K=3 on mt-bench, a CPU's lower bound is "
    assert re.search(bound, page, re.M)
    header, values = re.search(r"^a server, milliseconds:\n(.*)\n(.*)\n", page, re.M).groups()
    latencies = dict(zip(re.split(r"  +", header), re.split(r"  +", values), strict=True))
    assert latencies["arm"] == rung2.OURS
    assert all(float(latencies[name]) > 0 for name in ("p50_ttft_ms", "p99_ttft_ms", "p99_itl_ms", "start_seconds"))
    assert {f"server-P-EAGLE-K-3.1.server{end}.log" for end in ("", "-client")} <= archived


def test_a_rehearsal_of_rung_3(tmp_path: Path) -> None:
    """From prompts to a checked head that vLLM loads from what comes back. Called again, nothing is done again."""
    page, archived = rehearse(3, rung3, tmp_path)
    assert re.search(r"^MISSED: tokens of answers that the head has seen is \d", page, re.M)
    steps = ("server", "prompts", "answers", "data", "states", "first steps", "run", "check")
    steps += ("EAGLE-3: first steps", "EAGLE-3: run")
    assert all(re.search(rf"^{step}  +\d+", page, re.M) for step in steps)
    assert {"answers.jsonl.xz", "log.jsonl", "al.jsonl", "head.tar.0", "log-eagle3.jsonl", "eagle3.tar.0"} <= archived
    with tarfile.open(tmp_path / "head.tar.0") as head:
        head.extractall(tmp_path, filter="data")
    best = tmp_path / "run/checkpoints/best"
    for name in ("config.json", "model.safetensors", "edge/model.safetensors"):
        assert (tmp_path / "head" / name).read_bytes() == (best / name).read_bytes()
    before = best.stat().st_mtime_ns
    run, al = itertools.islice(train_gpu.train(str(tmp_path / "x")), 2)
    assert run["step"] == "run" and al["tokens seen"] > 0 and best.stat().st_mtime_ns == before


def test_eagle3_learns_from_the_answers_of_another_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them it says where they should be; with them they are the first step."""
    monkeypatch.setattr(train_gpu, "ANSWERS", tmp_path / "answers.jsonl.xz")
    with pytest.raises(SystemExit, match=r"answers\.jsonl\.xz: is not here; train P-EAGLE first"):
        next(train_gpu.train_eagle3(str(tmp_path / "x")))
    rows = [{"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 1]}, {"input_ids": [5], "loss_mask": [0]}]
    write_lines(tmp_path / "answers.jsonl", rows)
    train_gpu.ANSWERS.write_bytes(lzma.compress((tmp_path / "answers.jsonl").read_bytes()))
    cell = next(train_gpu.train_eagle3(str(tmp_path / "x")))
    assert (cell["step"], cell["tokens"], cell["share"]) == ("answers", 3, 0.6)
    assert [*read_lines(tmp_path / "run/answers.jsonl")] == rows


def test_a_rehearsal_of_rung_4(tmp_path: Path) -> None:
    """A windowed head drafts after a long prompt: the engine's speed, then its draft step."""
    page, _ = rehearse(4, rung4, tmp_path)
    name, prompt = re.escape(rung4.WINDOW), rung4.PROMPTS[0]
    assert re.search(rf"^engines with long prompts:\narm .*\n{name} +{prompt} +1 +[1-9]", page, re.M)
    assert re.search(rf"^draft steps with long prompts:\narm .*\n{name} +{prompt} +1 +[1-9]", page, re.M)


def test_what_is_done_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the prompts those without a gap in their numbers, of these the answered ones; a cut-off line is none."""

    def never_ends(*_: object) -> None:
        while True:
            pass

    monkeypatch.setattr(train_gpu, "do", never_ends)
    assert not train_gpu.within(0.05, "prompts", Config(target="x"))
    monkeypatch.setattr(train_gpu, "do", lambda *_: None)
    assert train_gpu.within(0.05, "prompts", Config(target="x"))
    assert train_gpu.num_sampled(tmp_path) == 0
    (tmp_path / "prompts.sampled.jsonl").write_text('{"number": 1}\n{"number": 0}\n{"number": 3}\n{"number": 2')
    assert train_gpu.num_sampled(tmp_path) == 2
    write_lines(tmp_path / "prompts.jsonl", ({"id": key} for key in "abc"))
    (tmp_path / "answers.jsonl").write_text('{"primary_id": "c"}\n{"primary_id": "a"}\n{"primary_id": "b')
    train_gpu.keep_answered(tmp_path)
    assert [row["id"] for row in read_lines(tmp_path / "prompts.jsonl")] == ["a", "c"]


@pytest.mark.parametrize("where", [["1", "engine"], ["1", "--seconds", "9", "--out", "x", "engine"]])
def test_only_parts_that_there_are(where: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind the options, where a GPU host's script has them."""
    monkeypatch.setattr(sys, "argv", ["gpu_day", *where])
    monkeypatch.setattr(gpu_day.arms, "NOT_INHERITED", ())
    with pytest.raises(SystemExit, match=r"^no such part: engine; there are: drafts CPU_ATTN eager"):
        gpu_day.main()


def speed(arm: str, c: int, tokens_per_second: float, **more: Any) -> dict[str, Any]:
    return {"arm": arm, "c": c, "tokens_per_second": {"median": tokens_per_second}, **more}


def test_goals_of_rung_1() -> None:
    rates = {(engine.OURS, 1): 500, (engine.STOCK_PEAGLE, 1): 390, (engine.OURS, 64): 900}
    cells = [speed(*place, rate) for place, rate in rates.items()] + [speed(engine.STOCK_PEAGLE, 64, 850)]
    cells.append({"arm": engine.OURS, "c": 1, "/ roofline": 1.2})
    cells.append({"kernel": "gather_hidden", "rows": 8192, "width": 2880, "of_copy_bandwidth": 0.7})
    assert [str(goal).partition(":")[0] for goal in rung1.goals(cells)] == [
        *("met", "MISSED", "not measured", "not measured", "met", "MISSED")
    ]


def test_goals_of_rung_2() -> None:
    """EAGLE-3's faster K counts, and the better one of what full batches may be served with."""
    low, high = committed()[rung2.OURS]["humaneval"]["al_95"]
    assert 1.6 < low < high < 1.8  # as docs/acceptance.md has it
    code, chat = {"set": "humaneval"}, {"set": "mt-bench"}
    rates = {rung2.EAGLE3[0]: 100, rung2.EAGLE3[1]: 90, rung2.OURS: 115, rung2.LOOKUP: 125}
    full = {rung2.NONE: 100, rung2.FOR_FULL_BATCHES[0]: 80, rung2.FOR_FULL_BATCHES[1]: 101}
    cells = [
        {"arm": rung2.OURS, "al": (low + high) / 2, **code},
        {"arm": rung2.OURS, "al": 1.2, **chat},
        *(speed(arm, 1, rate, **code) for arm, rate in rates.items()),
        *(speed(arm, 64, rate, **chat) for arm, rate in full.items()),
    ]
    assert [str(goal).partition(":")[0] for goal in rung2.goals(cells)] == [
        *("met", "met", "MISSED", "met"),
        *("MISSED", "not measured", "met", "not measured", "not measured", "met"),
    ]


def test_goals_of_rung_4() -> None:
    lookup, many = next(iter(real_gpu.ARMS_WITH_GRAPHS)), real_gpu.MOST
    cells = [speed(arm, 1, rate, prompt=rung4.PROMPTS[0]) for arm, rate in ((engine.OURS, 50), (engine.EAGLE3, 60))]
    cells += [speed(arm, many, rate, set="mt-bench") for arm, rate in ((lookup, 300), (rung2.NONE, 200))]
    assert [str(goal).partition(":")[0] for goal in rung4.goals(cells)] == [
        *("MISSED", "not measured", "not measured", "met", "not measured")
    ]


def test_times_no_speculation_are_of_the_same_set_and_concurrency() -> None:
    chat = {"set": "mt-bench"}
    cells = [*(speed(rung2.NONE, c, 100 * c, **chat) for c in (1, 8)), speed("n-gram K=5", 8, 400, **chat)]
    sampled = speed("EAGLE-3, sampled K=3", 8, 400, temperature=1.0, **chat)
    speeds = dict(rung2.tables([*cells, sampled]))["tokens/s"]
    assert [row.get("/ none") for row in speeds] == [1.0, 1.0, 0.5, None]


def test_second_turns_follow_the_answers_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_gpu, "HAS_GPU", True)
    answers = {name: len(texts) for name, texts in real_gpu.first_answers().items()}
    assert answers == {"humaneval": 0, "mt-bench": 80}


def test_a_missing_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_gpu, "PROMPTS", ROOT / ".cache/nowhere")
    for part in (real_gpu.run_arm(rung2.OURS), real_gpu.serve(rung2.OURS, "log")):
        with pytest.raises(SystemExit, match=r"^\.cache/nowhere is not here: `make real-target`, or carry it along$"):
            next(part)


def test_the_page_reads_logs_and_compiled_kernels(tmp_path: Path) -> None:
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


def on_gpu_host(code: str) -> Any:
    """What ``code`` prints as JSON, in a process that takes itself for one on a GPU host of 16 cores."""
    begin = "import torch; torch.cuda.is_available = lambda: True; import os; os.cpu_count = lambda: 16"
    command = [sys.executable, "-c", f'{begin}; os.environ.pop("OMP_NUM_THREADS", None)\n{code}']
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return json.loads(printed.splitlines()[-1])


def test_what_rung_1_would_run_on_a_gpu() -> None:
    """Every engine whose drafts are compared checks for waits, none that is timed, and no two parts share a file.

    Of 430 seconds, the first engine is still measured where another part hangs, and no three engines start at the same
    time.
    """
    code = """
import json
from benchmarks import rung1
from benchmarks.parts import CELLS, TESTS
kept = {CELLS, TESTS}
print(json.dumps([(p.name, p.label, p.limit, p.env, p.alone, len(kept & {*p.command})) for p in rung1.parts()]))
"""
    listed = on_gpu_host(code)
    assert len({label for _, label, *_ in listed}) == len(listed)
    for name, _, _, env, alone, num_files in listed:
        assert num_files == 1  # what it finishes is kept, as a list of cells or as lines of tests
        assert alone == (name in ("kernels", "sampled rows") or "compiled" in name)
        assert ("VLLM_GPU_SYNC_CHECK" in env) == (name.startswith("drafts") and "compiled" not in name)
        assert ("VLLM_MOE_ROUTING_SIMULATION_STRATEGY" in env) == name.startswith("engine")
    drafts = [(name, limit) for name, _, limit, *_ in listed if name.startswith("drafts")]
    assert len(drafts) == 6
    exact = [(name, limit) for name, _, limit, *_ in listed if name.startswith("exact")]
    hang = max(limit for name, limit in drafts + exact if "compiled" not in name)
    engine_limit = min(limit for name, _, limit, *_ in listed if name.startswith("engine"))
    assert hang + engine.TIMED_SECONDS <= engine_limit <= 430 - gpu_day.RESERVE
    for _, group in itertools.groupby(listed, key=lambda entry: entry[4]):
        assert len([name for name, *_ in group if name.startswith("engine")]) <= 2


def test_what_rung_2_would_run_on_a_gpu() -> None:
    """Every arm, on Model Runner V2 but stock P-EAGLE. All that should start together do, within 450 seconds."""
    code = """
import json
from benchmarks import parts, real_gpu, rung2
listed = [(part.name, part.label, part.limit, part.env, part.wave) for part in rung2.parts()]
assert all(parts.CELLS in part.command for part in rung2.parts())  # what it finishes is kept if it is killed
configs = {name: arm.speculative_config() for name, arm in real_gpu.ARMS.items()}
stages = real_gpu.START_SECONDS + real_gpu.TIMED_SECONDS
print(json.dumps([listed, configs, parts.SIDE_BY_SIDE, stages]))
"""
    listed, configs, side_by_side, stages = on_gpu_host(code)
    assert {name.removeprefix("engine ") for name, *_ in listed if name.startswith("engine ")} == {*configs}
    assert len({label for _, label, *_ in listed}) == len(listed)
    for name, _, limit, env, _ in listed:
        assert env["VLLM_USE_V2_MODEL_RUNNER"] == ("0" if "stock V1" in name else "1") and "TRITON_INTERPRET" not in env
        assert ("PEAGLE_VLLM_DISABLE" in env) == ("stock" in name or "P-EAGLE" not in name)
        assert env["OMP_NUM_THREADS"] == "1" and limit <= 450 - gpu_day.RESERVE
    assert stages <= min(limit for *_, limit, _, wave in listed if wave == 0)
    assert all(len([*group]) <= side_by_side for _, group in itertools.groupby(listed, key=lambda entry: entry[4]))
    drawn = {name: config.get("draft_sample_method") for name, config in configs.items() if "sampled" in name}
    assert drawn == dict.fromkeys(("P-EAGLE, sampled K=3", "EAGLE-3, sampled K=3"), "probabilistic")
    adaptive = [name for name, config in configs.items() if config and config.get("enable_adaptive_verification")]
    assert adaptive == [rung2.FOR_FULL_BATCHES[0]]


def test_what_rung_3_would_run_on_a_gpu() -> None:
    """Settings that `train` takes, and parts that fit 600 seconds of a GPU host."""
    code = """
import json
from benchmarks import rung3, train_gpu
from peagle_tools.train.peagle_yaml import Config
from peagle_tools.train.training import to_options
config = Config.model_validate(train_gpu.SETTINGS, context="/")
assert to_options(config.model_copy(update={"target": "models/tiny-llama"})).optimizer.optimizer == "muon"
print(json.dumps([(p.name, p.limit, p.alone) for p in rung3.parts()]))
"""
    listed = on_gpu_host(code)
    kinds = [name.partition(" ")[0] for name, *_ in listed]
    assert kinds == ["train", "acceptance", "acceptance", "train", "acceptance"]
    assert [alone for *_, alone in listed] == [kind == "train" for kind in kinds]
    limits = {kind: limit for kind, (_, limit, _) in zip(kinds, listed, strict=True)}
    assert sum(limits.values()) <= 600 - gpu_day.RESERVE


def test_what_rung_4_would_run_on_a_gpu() -> None:
    """Graphs for all requests of the small target; room for the longest prompt, and a head with a window."""
    code = """
import json, tempfile
from pathlib import Path
from benchmarks import engine, real_gpu, rung4
graphs = [arm.engine["max_cudagraph_capture_size"] for arm in real_gpu.ARMS_WITH_GRAPHS.values()]
folder = Path(tempfile.mkdtemp())
pair = engine.dummy_pair(engine.LONG_ARMS[rung4.WINDOW], [1], folder, max(rung4.PROMPTS))
head = json.loads((folder / "head/config.json").read_text())
listed = [(part.name, part.wave, part.limit) for part in rung4.parts()]
print(json.dumps([graphs, pair["max_model_len"], pair["enable_prefix_caching"], head["sliding_window"], listed]))
"""
    graphs, max_model_len, is_cached, window, listed = on_gpu_host(code)
    assert graphs == [6 * 128] * 2 and is_cached and window == 1024
    assert 128_000 + 592 < max_model_len <= 131_072  # as many as a draft step's measurement needs
    assert all(limit <= 430 - gpu_day.RESERVE for *_, limit in listed)
    waves = [wave for name, wave, _ in listed if name.startswith("long")]
    assert waves == sorted(waves) and max(map(waves.count, waves)) == 2
