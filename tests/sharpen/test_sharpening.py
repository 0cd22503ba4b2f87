"""``peagle-vllm sharpen`` as a whole, with fakes in place of vLLM's processes: what is written, resumed, refused."""

import errno
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from peagle_tools.shared import engines, prompt_files
from peagle_tools.shared.acceptance import Acceptance
from peagle_tools.shared.errors import ToolError
from peagle_tools.sharpen import fit, record, sharpening
from peagle_tools.sharpen.split_prompts import HELD_OUT, Prompts, divided
from peagle_vllm.heads.checks import check_pair
from peagle_vllm.heads.files import SELECTOR_FOLDER
from peagle_vllm.heads.head import read_head
from peagle_vllm.heads.selector import read_selector_config
from peagle_vllm.heads.target import read_target
from tests.inspect.running import only_line
from tests.inspect.running import run as command
from tests.sharpen.traces import trace
from tests.support.models import PEAGLE, TARGET, heldout

NUM_PROMPTS, ASIDE = 150, 37  # to learn from: four shards of 40; a fifth of all is kept aside
SHARDS = [f"{i:05}.safetensors" for i in range(4)]


class Engines:
    """What ``engines.in_process`` would have let vLLM do, and a fault at a chosen point."""

    def __init__(self) -> None:
        self.recorded: list[str] = []
        self.measured: list[tuple[str, int]] = []
        self.gain = 0.5  # of the sharpened head
        self.fault: Callable[[str], None] = lambda what: None

    def __call__(self, task: Callable[..., Any], pair: engines.Pair, *args: Any) -> Any:
        return {record.record_all: self.record, engines.measure: self.measure}[task](pair, *args)

    def record(self, pair: engines.Pair, prompts: list, folder: Path, num_k: int, candidates: int, _: int) -> None:
        made = trace(4_000, num_k, candidates)
        made = made._replace(prompt=torch.arange(4_000, dtype=torch.int32) % len(prompts))
        for file, group in record.shards(prompts, folder):
            if not file.exists():
                self.fault("record")
                made.rows((made.prompt >= group[0][0]) & (made.prompt <= group[-1][0])).save(file)
                self.recorded.append(file.name)

    def measure(self, pair: engines.Pair, prompts: list, num_k: int, longest: int) -> list[Acceptance]:
        self.fault("measure")
        assert read_head(Path(pair.head)).tensors  # a head that stands
        self.measured.append((Path(pair.head).name, num_k))
        more = int(40 * self.gain) if Path(pair.head).name == "sharpened" else 0
        counts = [(50 + more + i % 3, 30) for i in range(len(prompts) // engines.GROUP)]
        return [Acceptance(100, (*count, *[0] * (num_k - 2))) for count in counts]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Engines:
    made = Engines()
    monkeypatch.setattr(engines, "in_process", made)
    monkeypatch.setattr(record, "SHARD", 40)
    monkeypatch.setattr(fit, "EPOCHS", 1)
    return made


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"question {i}\n" for i in range(NUM_PROMPTS + ASIDE)))
    return file


@pytest.fixture
def sharpen(tmp_path: Path, prompts: Path, fakes: Engines, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The command, on the shipped tiny pair, with K = 3."""

    def start(*more: object) -> Any:
        options = ("--target", TARGET, "--prompts", prompts, "-k", 3, *more)
        return command(monkeypatch, "sharpen", PEAGLE, tmp_path / "out", *options)

    return start


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "prompts.txt")


def test_what_is_written_is_served_by_every_vllm(tmp_path: Path, sharpen: Callable, fakes: Engines):
    ran = sharpen()
    assert ran.code == 0, ran.err
    assert left(tmp_path) == ["out"]
    out = tmp_path / "out"
    head = read_head(out)
    assert check_pair(head, read_target(str(TARGET)), num_speculative_tokens=3) == []
    assert left(out) == ["config.json", SELECTOR_FOLDER, "model.safetensors"]
    assert (out / "model.safetensors").read_bytes() == (PEAGLE / "model.safetensors").read_bytes()
    config = json.loads((out / "config.json").read_text())
    selector_config = config.pop("candidate_selector")
    assert config == json.loads((PEAGLE / "config.json").read_text())
    assert (selector_config["selector_rank"], selector_config["selector_top_k"]) == (64, 16)
    tensors = load_file(out / SELECTOR_FOLDER / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in tensors.items() if "scale" not in name)
    words = " ".join(ran.out.split())
    assert "4,000 drafts recorded" in words and "(chosen)" in words and "wrote" in words
    assert fakes.measured == [("tiny-llama-peagle", 3), ("sharpened", 3)]
    assert fakes.recorded == SHARDS
    notes = json.loads((out / SELECTOR_FOLDER / "sharpen.json").read_text())
    assert notes["plan"]["num_speculative_tokens"] == 3
    assert notes["served"][0]["after"][0] > notes["served"][0]["before"][0]


def test_what_is_no_better_is_not_written(tmp_path: Path, sharpen: Callable, fakes: Engines):
    fakes.gain = 0.0
    ran = sharpen()
    assert ran.code == 1
    assert ran.err.splitlines()[-1].startswith(f"no better than {PEAGLE} on held-out prompts: nothing is written")
    assert left(tmp_path) == []


def interrupted(at: str, after: int) -> Callable[[str], None]:
    """Stop where the ``after``-th thing of this kind begins, as a killed process does."""
    before = iter(range(after))

    def fault(what: str) -> None:
        if what == at and next(before, None) is None:
            raise KeyboardInterrupt

    return fault


@pytest.mark.parametrize(("at", "after"), [("record", 0), ("record", 2), ("measure", 1)])
def test_it_goes_on_where_it_was_stopped(at: str, after: int, tmp_path: Path, fakes: Engines):
    fakes.fault = interrupted(at, after)
    with pytest.raises(KeyboardInterrupt):
        run_sharpen(tmp_path / "out")
    assert left(tmp_path) == [".out.sharpen"]
    assert len(fakes.recorded) == (after if at == "record" else 4)
    fakes.fault = lambda what: None
    run_sharpen(tmp_path / "out")
    assert fakes.recorded == SHARDS  # none twice
    assert left(tmp_path) == ["out"]


def run_sharpen(out: Path, seed: int = 0, **changes: Any) -> sharpening.Sharpened:
    asked = [[seed, i] for i in range(NUM_PROMPTS)]
    prompts = Prompts(asked, asked[:16])
    plan = replace(sharpening.Plan(3, rank=8, num_candidates=4, max_tokens=9, arguments={}), **changes)
    return sharpening.sharpen(
        read_head(PEAGLE), sharpening.Job(read_target(str(TARGET)), prompts, plan, lambda *_: None), out
    )


@pytest.mark.parametrize("change", [{"seed": 1}, {"rank": 16}, {"arguments": {"seed": 1}}])
def test_what_was_begun_otherwise_is_not_mixed(change: dict[str, Any], tmp_path: Path, fakes: Engines):
    fakes.fault = interrupted("record", 1)
    with pytest.raises(KeyboardInterrupt):
        run_sharpen(tmp_path / "out")
    with pytest.raises(ToolError, match=r"out.sharpen was begun with another head, prompts or options; remove it"):
        run_sharpen(tmp_path / "out", **change)


def test_unusable_input_is_one_line(tmp_path: Path, sharpen: Callable, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "out").mkdir()
    assert "out exists; name a folder that does not" in only_line(sharpen())
    (tmp_path / "out").rmdir()
    few = tmp_path / "few.txt"
    few.write_text("".join(f"question {i}\n" for i in range(45)))
    assert "36 prompts to learn from, at least 40 are needed" in only_line(sharpen("--prompts", few))
    with monkeypatch.context() as others:
        others.setattr(prompt_files, "control_tokens", {str(TARGET): re.compile("question 7$")}.get)
        assert "few.txt:8 is in a chat template already (question 7)" in only_line(sharpen("--prompts", few))
    few.write_text("one\ntwo\n")
    assert "2 prompts to measure with, at least 8 are needed" in only_line(sharpen("--held-out", few))
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((TARGET / "config.json").read_bytes())
    assert "has no tokenizer that can be read" in only_line(sharpen("--target", bare))
    assert left(tmp_path) == ["bare", "few.txt"]


def full(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("file", ["plan.json", "model.safetensors", "sharpen.json"])
def test_a_full_disk_is_one_line(file: str, tmp_path: Path, sharpen: Callable, monkeypatch: pytest.MonkeyPatch):
    """While the plan, the selector or the finished head is written."""

    def fills(original: Callable) -> Callable:
        return lambda path, *args, **more: full() if file in path.name else original(path, *args, **more)

    for name in ("write_bytes", "write_text"):
        monkeypatch.setattr(Path, name, fills(getattr(Path, name)))
    assert "cannot be written (No space left on device)" in only_line(sharpen())
    assert left(tmp_path) == [".out.sharpen"]


def test_a_full_disk_while_recording_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In the process that records."""
    llm = SimpleNamespace(collective_rpc=lambda *_, **__: [[]], llm_engine=None)
    monkeypatch.setattr(record, "answer", lambda *_: {"0": (0, [1, 1], 1)})
    monkeypatch.setattr(engines.Pair, "engine", lambda *_: nullcontext(llm))
    monkeypatch.setattr(record, "trace_of", lambda *_: trace(8))
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ToolError, match=r"00000.safetensors cannot be written \(No space left on device\); make room"):
        record.record_all(engines.Pair("target", "head", {}), [[1]], tmp_path, 3, 4, 9)
    assert not (tmp_path / "00000.safetensors").exists()


def test_prompts_are_mixed_and_none_is_on_both_sides():
    prompts = [[{"role": "user", "content": str(i % 350)}] for i in range(400)]
    learned, aside = divided(prompts, None)
    assert len(aside) == HELD_OUT
    assert not any(prompt in learned for prompt in aside)
    assert learned != sorted(learned, key=str)
    assert divided(prompts, None) == (learned, aside)
    assert [len(part) for part in divided(prompts[:82], None)] == [66, 16]
    learned, aside = divided(prompts, prompts[:3])
    assert aside == prompts[:3] and not any(prompt in learned for prompt in aside)


def test_a_heads_own_selector_is_fitted_further(tmp_path: Path, fakes: Engines, monkeypatch: pytest.MonkeyPatch):
    """The result has the shapes of the head's own selector, with which it began."""
    (tmp_path / "prompts.txt").write_text("".join(f"question {i}\n" for i in range(60)))
    monkeypatch.setattr(fit, "FORMS", ("table",))  # the fakes' hidden states are not as wide as the head's
    first, out = tmp_path / "first", tmp_path / "out"
    anew = (first, tmp_path / "anew", ("--rank", 4))
    for head, made, more in ((PEAGLE, first, ("--rank", 8, "--candidates", 5)), anew, (first, out, ())):
        options = ("--target", TARGET, "--prompts", tmp_path / "prompts.txt", "-k", 3, *more)
        ran = command(monkeypatch, "sharpen", head, made, *options)
        assert ran.code == 0, ran.err
        assert ("table (chosen)" in ran.out, "own (chosen)" in ran.out) == (more != (), more == ())
    notes = json.loads((out / SELECTOR_FOLDER / "sharpen.json").read_text())
    assert (notes["plan"]["rank"], notes["plan"]["num_candidates"]) == (8, 5)
    shapes = [
        {name: tensor.shape for name, tensor in load_file(made / SELECTOR_FOLDER / "model.safetensors").items()}
        for made in (first, out)
    ]
    assert shapes[0] == shapes[1]


def test_the_engines_process_ends_with_the_command(tmp_path: Path):
    """However that ends. A spawned process would live on, with all its memory."""
    there = tmp_path / "there"
    task = f"import pathlib, time; pathlib.Path({str(there)!r}).touch(); time.sleep(600)"
    code = f"from peagle_tools.shared.engines import in_process; in_process(exec, {task!r})"
    killed = psutil.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    while not there.exists():
        time.sleep(0.05)
    children = killed.children()
    killed.kill()
    killed.wait()
    assert children and not psutil.wait_procs(children, 20)[1]


@pytest.mark.full
def test_the_shipped_pair_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """120 prompts are too few to gain much: what counts is that vLLM records, serves and measures."""
    texts = [json.dumps({"prompt": text[:size]}) for size in (400, 120) for text in heldout()][:128]
    file, aside, out = tmp_path / "prompts.jsonl", tmp_path / "aside.jsonl", tmp_path / "out"
    file.write_text("\n".join(texts))
    aside.write_text("\n".join(texts[:8]))
    options = ("--target", TARGET, "--prompts", file, "--held-out", aside, "-k", 3, "--max-tokens", 32, "--json")
    engine = {"dtype": "float32", "kv_cache_memory_bytes": 256 << 20}
    ran = command(monkeypatch, "sharpen", PEAGLE, out, *options, "--engine", json.dumps(engine))
    assert ran.code in (0, 1), ran.err
    found = json.loads(ran.out)
    assert found["drafts"] > 800
    (served,) = found["served"]
    assert 2 < served["before"][0] < 4 and 2 < served["after"][0] < 4
    assert out.exists() == (ran.code == 0)
    if ran.code == 0:
        assert read_selector_config(read_head(out).config, "") is not None
