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
import torch
from safetensors.torch import load, load_file, save_file

from benchmarks import engine, gpu_day, real, real_gpu, rung1, rung2, rung3, rung4, train_eagle3, train_gpu
from benchmarks.arms import ROOT
from benchmarks.page import from_log
from benchmarks.parts import STATE, Part
from peagle_tools.shared.errors import TryAgain
from peagle_tools.train.lines import read_lines, write_lines
from peagle_tools.train.peagle_yaml import Config, read_config
from tests.train.runs import toy_run


def rehearse(number: int, rung: ModuleType, out: Path) -> tuple[str, set[str]]:
    """A whole rung without a GPU: its page, and what its archive holds."""
    command = [sys.executable, "-m", "benchmarks.gpu_day", str(number), "--seconds", "600", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in itertools.chain(*rung.parts()):
        assert re.search(rf"^{re.escape(part.name)}, done, \d+$", done.stdout, re.M)
    page = (out / f"page-{number}.txt").read_text()
    assert "not done" not in page and "not measured" in page  # 64 requests
    with tarfile.open(out / f"rung-{number}.tar.gz") as archive:
        return page, {name.removeprefix(f"rung-{number}/") for name in archive.getnames()}


def test_a_rehearsal_of_rung_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_COMMIT", "the copied one")
    page, archived = rehearse(1, rung1, tmp_path)
    assert re.search(r"^EAGLE-3 K=3, V2 +8 +1 +[1-9].*\ndraft steps:\n.*\nEAGLE-3 K=3, V2 +8 +1 +[1-9]", page, re.M)
    assert re.search(r"^drafts CPU_ATTN eager lookup: (\d+) of \1 tests passed, [1-9]", page, re.M)
    result = json.loads((tmp_path / "rung-1.json").read_text())
    assert result["commit"] == "the copied one" and len(result["cells"]) == 4
    assert {"page-1.txt", STATE, "kernels.1.jsonl", "kernels.1.log"} <= archived


def test_a_rehearsal_of_rung_2(tmp_path: Path) -> None:
    page, _ = rehearse(2, rung2, tmp_path)
    bound = r"^(met|MISSED): acceptance length of P-EAGLE K=3 on mt-bench, a CPU's lower bound is "
    assert re.search(bound, page, re.M)
    assert re.search(r"^tokens/s:\n.*\nP-EAGLE K=3 +humaneval +1 +[1-9]", page, re.M)


def test_a_rehearsal_of_rung_3(tmp_path: Path) -> None:
    """From prompts to a checked head, of which what vLLM reads comes back; then EAGLE-3, from the same answers."""
    page, archived = rehearse(3, rung3, tmp_path)
    assert re.search(r"^MISSED: tokens of answers that P-EAGLE has seen is \d", page, re.M)
    steps = ("server", "prompts", "answers", "data", "first steps", "run", "check")
    steps += ("EAGLE-3: first steps", "EAGLE-3: run")
    assert all(len(re.findall(rf"^{step}  +\d+", page, re.M)) == 1 for step in steps)
    logs = {"server.log", "head-log.jsonl", "head-al.jsonl", "eagle3-log.jsonl"}
    assert logs | {"answers.jsonl.xz", "head.tar.0"} <= archived
    with tarfile.open(tmp_path / "head.tar.0") as head:
        head.extractall(tmp_path, filter="data")
    run = tmp_path / "run"
    for name in ("config.json", "edge/model.safetensors"):
        assert (tmp_path / "head" / name).read_bytes() == (run / "checkpoints/best" / name).read_bytes()
    came, trained = (load_file(path / "model.safetensors") for path in (tmp_path / "head", run / "checkpoints/best"))
    assert trained.keys() - came.keys() == {"embed_tokens.weight"} and all(came[n].equal(trained[n]) for n in came)
    arms = [train_gpu.trained(run, drafter) for drafter in ("P-EAGLE", "EAGLE-3")]
    assert ["parallel_drafting" in (arm.speculative_config() or {}) for arm in arms] == [True, False]
    rates = [row["lr"]["AdamW"] for row in read_lines(run / "log.jsonl") if "lr" in row]
    assert len(rates) == train_gpu.FEWEST_STEPS and rates[-1] < max(rates) / 2


def test_training_goes_on(tmp_path: Path) -> None:
    """In a second call, with as many steps as the first one found room for."""
    _, stages = train_gpu.begin(str(tmp_path / "x"))
    stages.keep("data", 0, **{"a step": 50})
    stages.keep("first steps", 0, steps=20)
    lines = [{"step": step, "time": step, "tokens/s": 3, "loss": 2, "peak_gb": 1} for step in (1, 20)]
    write_lines(tmp_path / "run/log.jsonl", lines)
    (config, stages), ran = train_gpu.begin(str(tmp_path / "x"), after="data"), list[Config]()
    (cell,) = train_gpu.learn(config, stages, ran.append)
    assert [config.optimizer.steps for config in ran] == [20]
    assert cell["step"] == "run" and cell["tokens"] == 20 * 50


def test_eagle3_training_that_was_stopped_is_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """speculators returns after a signal as it does at the end."""
    monkeypatch.setattr(train_eagle3.cli, "main", lambda *_: None)
    with pytest.raises(TryAgain, match="stopped before its 12 steps"):
        train_eagle3.train_eagle3(train_gpu.changed(read_config(toy_run(tmp_path)), **train_eagle3.EAGLE3))


def test_heads_come_back_from_parts_that_were_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The best P-EAGLE head, by the next call the newest EAGLE-3 head, once, with their logs."""
    for head in ("checkpoints/best", "eagle3/checkpoints/9", "eagle3/checkpoints/10"):
        (tmp_path / "run" / head).mkdir(parents=True)
        save_file({head: torch.zeros(2)}, tmp_path / "run" / head / "model.safetensors")
    (tmp_path / "run/log.jsonl").write_text("a line\n")
    for name, head in (("head", "checkpoints/best"), ("eagle3", "eagle3/checkpoints/10")):
        train_gpu.bring_back(tmp_path)
        assert (tmp_path / "head-log.jsonl").read_text() == "a line\n"
        with tarfile.open(tmp_path / f"{name}.tar.0") as archive:
            weights = archive.extractfile("head/model.safetensors")
            assert weights and load(weights.read()).keys() == {head}
        (tmp_path / f"{name}.tar.0").unlink()
        assert not [*tmp_path.glob("*.tar.*")]
    half = tmp_path / "run/eagle3/checkpoints/11/model.safetensors"
    half.parent.mkdir()
    half.write_bytes(b"cut off")
    train_gpu.bring_back(tmp_path)
    assert not [*tmp_path.glob("*.tar.*")] and "11: is not brought back" in capsys.readouterr().out


def test_steps_fill_their_share_of_the_time_or_see_all_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number follows from the time between the last of the first steps that were logged."""
    config, stages = train_gpu.begin(str(tmp_path / "x"))
    stages.keep("data", 0, **{"a step": 100})

    def run(_: Config) -> None:
        (config.run / "checkpoints").mkdir(exist_ok=True)
        times = {1: 0, 11: 90, 21: 92}
        write_lines(config.run / "log.jsonl", [{"step": n, "time": t, "tokens/s": 1} for n, t in times.items()])

    monkeypatch.setattr(train_gpu, "STEPS_SECONDS", 10)
    for most, steps in ((1e6, 50), (3000, 30), (0, train_gpu.FEWEST_STEPS)):
        monkeypatch.setattr(train_gpu, "MOST_TOKENS", most)
        assert next(train_gpu.learn(config, stages, run))["steps"] == steps
        del stages["first steps"]


def test_answers_of_another_lease_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several files of them may be joined; without any, and without answers here, it says where they should be."""
    monkeypatch.setattr(train_gpu, "ANSWERS", tmp_path / "answers.jsonl.xz")
    with pytest.raises(SystemExit, match=r"answers\.jsonl\.xz: is not here.*run the part 'answers'"):
        next(train_gpu.data(str(tmp_path / "x")))
    rows = [{"id": name, "text": "\u2028", "loss_mask": [0, 1]} for name in "abc"]
    pieces = [lzma.compress((json.dumps(row, ensure_ascii=False) + "\n").encode()) for row in rows[1:]]
    train_gpu.ANSWERS.write_bytes(b"".join(pieces))
    write_lines(tmp_path / "answers.jsonl", [*rows[:2], {"id": "cut off", "metadata": {}}])
    train_gpu.gather(tmp_path / "answers.jsonl")
    assert [*read_lines(tmp_path / "answers.jsonl")] == rows


def test_a_part_says_which_step_it_needs(tmp_path: Path) -> None:
    for part, step in ((train_gpu.train, "data"), (train_gpu.train_eagle3, "data"), (train_gpu.check, "run")):
        with pytest.raises(SystemExit, match=f"the step '{step}' is not finished there; run its part first"):
            next(part(str(tmp_path / "x")))


def test_a_rehearsal_of_rung_4(tmp_path: Path) -> None:
    """A windowed head drafts after a long prompt: the engine's speed, then its draft step."""
    page, _ = rehearse(4, rung4, tmp_path)
    name, prompt = re.escape(engine.WINDOW), rung4.PROMPTS[0]
    assert re.search(rf"^engines with long prompts:\narm .*\n{name} +{prompt} +1 +[1-9]", page, re.M)
    assert re.search(rf"^draft steps with long prompts:\narm .*\n{name} +{prompt} +1 +[1-9]", page, re.M)


@pytest.mark.parametrize("where", [["1", "engine"], ["1", "--seconds", "9", "--out", "x", "engine"]])
def test_only_parts_that_there_are(where: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind the options, where a GPU host's script has them."""
    monkeypatch.setattr(sys, "argv", ["gpu_day", *where])
    monkeypatch.setattr(gpu_day.arms, "NOT_INHERITED", ())
    with pytest.raises(SystemExit, match=r"^no such part: engine; there are: drafts CPU_ATTN eager"):
        gpu_day.main()


@pytest.mark.parametrize("number", [1, 2])
def test_goals_of_what_was_measured(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the page of that day has them, whatever heads are committed now."""
    monkeypatch.setattr(rung2, "committed", dict)
    results = ROOT / "benchmarks/results/gpu"
    cells = json.loads((results / f"rung-{number}.json").read_text())["cells"]
    goals = [*map(str, gpu_day.RUNGS[number].goals(cells))]
    lines = (results / f"page-{number}.txt").read_text().splitlines()
    assert goals == [line for line in lines if line.startswith(("met", "MISSED", "not measured"))]


def test_goals_of_rung_4() -> None:
    one, many = {"c": 1, "prompt": rung4.PROMPTS[0]}, {"c": real_gpu.MOST, "set": "mt-bench"}
    rates = [(engine.OURS, 50, one), (engine.EAGLE3, 60, one)]
    rates += [(real_gpu.WITH_GRAPHS[0], 300, many), (rung2.NONE, 200, many)]
    cells = [{"arm": arm, "tokens_per_second": {"median": rate}, **more} for arm, rate, more in rates]
    verdicts = ["MISSED", "not measured", "not measured", "met", "not measured"]
    assert [str(goal).partition(":")[0] for goal in rung4.goals(cells)] == verdicts


def test_a_missing_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "PROMPTS", ROOT / ".cache/nowhere")
    with pytest.raises(SystemExit, match=r"^\.cache/nowhere is not here: `make real-target`, or carry it along$"):
        next(real_gpu.run_arm(rung2.OURS))


def test_the_page_reads_logs(tmp_path: Path) -> None:
    part = Part("engine one", ())
    (tmp_path / "engine-one.1.log").write_text(
        "INFO [cuda.py:1] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].\n"
        "WARNING GPU<->CPU sync detected - avoid it\n"
        "WARNING 11-26 03:00:00 [jit_monitor.py:140] Triton JIT compile during inference: _walk_kernel (x). T\n"
    )
    assert [*from_log(part, tmp_path)] == [
        "log of engine one: Triton JIT compile during inference: _walk_kernel (x); Using FLASH_ATTN attention backend; "
        "1 x GPU<->CPU sync detected",
    ]


ON_GPU = """
import json, os, tempfile, torch
from dataclasses import asdict
from pathlib import Path
torch.cuda.is_available = lambda: True
os.cpu_count = lambda: 16
os.environ.pop("OMP_NUM_THREADS", None)
from benchmarks import engine, gpu_day, parts, real_gpu, rung4, train_gpu
from peagle_tools.train.peagle_yaml import Config
from peagle_tools.train.training import to_options
config = Config.model_validate(train_gpu.SETTINGS, context="/").model_copy(update={"target": "models/tiny-llama"})
config = config.model_copy(update={"head": config.head.model_copy(update={"draft_vocab": None})})
folder = Path(tempfile.mkdtemp())
long = engine.dummy_pair(engine.LONG_ARMS[engine.WINDOW], [1], folder, max(rung4.PROMPTS))
print(json.dumps({
    "groups": {
        n: [[asdict(part) | {"label": part.label} for part in group] for group in rung.parts()]
        for n, rung in gpu_day.RUNGS.items()
    },
    "side by side": parts.SIDE_BY_SIDE,
    "real": {name: arm.speculative_config() for name, arm in real_gpu.ARMS.items()},
    "stages": real_gpu.START_SECONDS + real_gpu.TIMED_SECONDS,
    "optimizer": to_options(config).optimizer.optimizer,
    "answers": str(train_gpu.ANSWERS),
    "graphs": [real_gpu.ARMS[name].engine["max_cudagraph_capture_size"] for name in real_gpu.WITH_GRAPHS],
    "long": long,
    "dummy": {name: engine.dummy_pair(arm, [1, 64], folder / name) for name, arm in engine.ARMS.items()},
    "window": json.loads((folder / "head/config.json").read_text())["sliding_window"],
}))
"""


@pytest.fixture(scope="module")
def on_gpu() -> dict[str, Any]:
    """What would run on a GPU host of 16 cores: a process takes itself for one."""
    command = [sys.executable, "-c", ON_GPU]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return json.loads(printed.splitlines()[-1])


def kind(part: dict[str, Any]) -> str:
    return part["name"].partition(" ")[0]


def test_parts_keep_what_they_finish(on_gpu: dict[str, Any]) -> None:
    """No two share a file, and each fits a call of a GPU host."""
    for parts in ([*itertools.chain(*groups)] for groups in on_gpu["groups"].values()):
        assert len({part["label"] for part in parts}) == len(parts)
        assert all(part["limit"] <= 600 - gpu_day.RESERVE for part in parts)


def test_what_rung_1_would_run_on_a_gpu(on_gpu: dict[str, Any]) -> None:
    """Every engine whose drafts are compared checks for waits, none that is timed, nor three at once."""
    groups = on_gpu["groups"]["1"]
    parts = [*itertools.chain(*groups)]
    for part in parts:
        compiles = "compiled" in part["name"]
        assert ([part] in groups) == (part["name"] == "kernels" or compiles)
        assert ("VLLM_GPU_SYNC_CHECK" in part["env"]) == (kind(part) == "drafts" and not compiles)
        assert ("VLLM_MOE_ROUTING_SIMULATION_STRATEGY" in part["env"]) == (kind(part) == "engine")
    assert [*map(kind, parts)].count("drafts") == 6
    hang = max(part["limit"] for part in groups[0] if kind(part) in ("drafts", "exact"))
    engine_limit = min(part["limit"] for part in parts if kind(part) == "engine")
    assert hang + engine.TIMED_SECONDS <= engine_limit <= 430 - gpu_day.RESERVE
    assert all([*map(kind, group)].count("engine") <= 2 for group in groups)


def test_arguments_of_engines_on_a_gpu(on_gpu: dict[str, Any]) -> None:
    """Graphs for every batch size, and synthetic acceptance."""
    for name, arm in engine.ARMS.items():
        arguments = on_gpu["dummy"][name]
        assert arguments["compilation_config"]["max_cudagraph_capture_size"] == 64 * (2 * arm.k if arm.k else 1)
        assert arguments["max_num_batched_tokens"] >= 2 * arm.k * 64
        assert ("speculative_config" in arguments) == (name != engine.NONE)
        if speculative := arguments.get("speculative_config"):
            assert 1 <= speculative["synthetic_acceptance_length"] == arm.length <= arm.k + 1
            assert ("parallel_drafting" in speculative) == arm.parallel
            has_lookup = arm.parallel and "PEAGLE_VLLM_DISABLE" not in arm.env
            assert speculative.get("prompt_lookup_min") == (0 if has_lookup else None)


@pytest.mark.parametrize("k", [3, 5, 7, 10])
def test_every_arm_has_a_graph_for_its_rows(k: int) -> None:
    """V1 drops what rounding to whole requests lifts over the largest size: that must be none of these."""
    batches = [1, 4, 16, 64, 256]
    sizes = engine.graph_sizes(batches, k)
    rounded = {-(-size // (k + 1)) * (k + 1) for size in sizes["cudagraph_capture_sizes"]}
    assert max(rounded) == sizes["max_cudagraph_capture_size"]
    for rows in (rows for n in batches for rows in (n, n * (k + 1), n * 2 * k)):
        assert any(size >= rows for size in rounded)


def test_what_rung_2_would_run_on_a_gpu(on_gpu: dict[str, Any]) -> None:
    """Every arm, on Model Runner V2 but stock P-EAGLE. All that should start together do, within 450 seconds."""
    groups = on_gpu["groups"]["2"]
    parts = [*itertools.chain(*groups)]
    arms = {name: config or {} for name, config in on_gpu["real"].items() if "graphs" not in name}
    assert {part["name"].removeprefix("engine ") for part in parts if kind(part) == "engine"} == {*arms}
    for part in parts:
        name, env = part["name"], part["env"]
        assert env["VLLM_USE_V2_MODEL_RUNNER"] == ("0" if "stock V1" in name else "1") and "TRITON_INTERPRET" not in env
        assert ("PEAGLE_VLLM_DISABLE" in env) == ("stock" in name or "P-EAGLE" not in name)
        assert env["OMP_NUM_THREADS"] == "1"
    assert on_gpu["stages"] <= min(part["limit"] for part in groups[0])
    assert max(map(len, groups)) <= on_gpu["side by side"]
    drawn = [name for name, config in arms.items() if config.get("draft_sample_method") == "probabilistic"]
    assert drawn == ["P-EAGLE, sampled K=3", "EAGLE-3, sampled K=3"]
    adaptive = [name for name, config in arms.items() if config.get("enable_adaptive_verification")]
    assert adaptive == [rung2.FOR_FULL_BATCHES[0]]


def test_what_rung_3_would_run_on_a_gpu(on_gpu: dict[str, Any]) -> None:
    """Settings that `train` takes; EAGLE-3 drafts without the plugin."""
    groups = on_gpu["groups"]["3"]
    assert on_gpu["optimizer"] == "muon" and on_gpu["answers"].endswith(".cache/answers.jsonl.xz")
    kinds = [[*map(kind, group)] for group in groups]
    assert kinds == [["answers"], ["data"], ["train"] * 2, ["acceptance"] * 3, ["check"]]
    env = {part["name"]: part["env"] for part in itertools.chain(*groups)}
    assert ["PEAGLE_VLLM_DISABLE" in env[f"acceptance {name} K=7"] for name in ("P-EAGLE", "EAGLE-3")] == [False, True]


def test_what_rung_4_would_run_on_a_gpu(on_gpu: dict[str, Any]) -> None:
    """Graphs for all requests of the small target; room for the longest prompt, and a head with a window."""
    assert on_gpu["graphs"] == [6 * 128] * 2 and on_gpu["window"] == 1024 and on_gpu["long"]["enable_prefix_caching"]
    # As many more as a draft step's measurement needs.
    assert 128_000 + 592 < on_gpu["long"]["max_model_len"] <= 131_072
    assert [[*map(kind, group)] for group in on_gpu["groups"]["4"]] == [["many"] * 3, *[["long"] * 2] * 2, ["long"]]
