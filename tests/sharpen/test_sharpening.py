"""``peagle-vllm sharpen`` as a whole, with fakes in place of vLLM's processes: what is written, and what is refused."""

import errno
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from peagle_tools.shared import engines
from peagle_tools.shared.acceptance import Acceptance
from peagle_tools.shared.errors import ToolError
from peagle_tools.sharpen import fit, record
from peagle_tools.sharpen.sharpening import HELD_OUT, split
from peagle_vllm.heads.checks import check_pair
from peagle_vllm.heads.files import SELECTOR_FOLDER
from peagle_vllm.heads.head import read_head
from peagle_vllm.heads.selector import read_selector_config
from peagle_vllm.heads.target import read_target
from tests.sharpen.traces import traced
from tests.support.command import Result, only_line, run
from tests.support.models import PEAGLE, TARGET, heldout


class Engines:
    """What ``engines.in_process`` would have let vLLM do."""

    gain = 0.5  # of the sharpened head

    def __init__(self) -> None:
        self.measured: list[tuple[bool, int]] = []  # whether it has a selector, K

    def __call__(self, task: Callable[..., Any], pair: engines.Pair, *args: Any) -> Any:
        return {record.record_all: self.record, engines.measure: self.measure}[task](pair, *args)

    def record(self, pair: engines.Pair, prompts: list, folder: Path, num_k: int, candidates: int, _: int) -> None:
        trace = traced(4_000, num_k, candidates)
        hidden, prompt = torch.randn(4_000, num_k, 128), torch.arange(4_000, dtype=torch.int32) % len(prompts)
        trace = trace._replace(hidden=hidden, prompt=prompt)
        for number in (0, 1):
            trace.rows(trace.prompt % 2 == number).save(folder / f"{number}.safetensors")

    def measure(self, pair: engines.Pair, prompts: list, num_k: int, longest: int) -> list[Acceptance]:
        head = read_head(Path(pair.head))  # one that can be loaded
        more, scatter = (int(40 * self.gain), 5) if len(self.measured) % 2 else (0, 1)  # the head itself comes first
        self.measured.append((read_selector_config(head.config, "") is not None, num_k))
        counts = [(50 + more + i % 3 * scatter, 30) for i in range(len(prompts) // engines.GROUP)]
        return [Acceptance(100, (*count, *[0] * (num_k - 2))) for count in counts]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Engines:
    fakes = Engines()
    monkeypatch.setattr(engines, "in_process", fakes)
    monkeypatch.setattr(fit, "EPOCHS", 1)
    return fakes


@pytest.fixture
def sharpen(tmp_path: Path, fakes: Engines) -> Callable[..., Result]:
    """The command, on the shipped tiny pair, with K = 3."""
    (tmp_path / "prompts.txt").write_text("".join(f"question {i}\n" for i in range(60)))

    def start(*more: object, head: Path = PEAGLE, out: str = "out") -> Result:
        options = ("--target", TARGET, "--prompts", tmp_path / "prompts.txt", "-k", 3, *more)
        return run("sharpen", head, tmp_path / out, *options)

    return start


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "prompts.txt")


def test_what_is_written_is_served_by_every_vllm(tmp_path: Path, sharpen: Callable, fakes: Engines):
    """And can be written to, where the head cannot. It lacks what a checkpoint has for training."""
    head = shutil.copytree(PEAGLE, tmp_path / "head")
    weight_map = dict.fromkeys(read_head(PEAGLE).tensors, "model.safetensors")
    (head / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name in ("master.safetensors", "optimizer.pt"):
        shutil.copy(head / "model.safetensors", head / name)
    for file in head.iterdir():
        file.chmod(0o444)
    ran = sharpen(head=head)
    assert ran.exit_code == 0, ran.stderr
    assert left(tmp_path) == ["head", "out"]
    out = tmp_path / "out"
    assert check_pair(read_head(out), read_target(str(TARGET)), num_speculative_tokens=3) == []
    assert left(out) == ["config.json", SELECTOR_FOLDER, "model.safetensors", "model.safetensors.index.json"]
    assert all(file.stat().st_mode & 0o200 for file in out.iterdir())
    assert (out / "model.safetensors").read_bytes() == (PEAGLE / "model.safetensors").read_bytes()
    config = json.loads((out / "config.json").read_text())
    selector_config = config.pop("candidate_selector")
    assert config == json.loads((PEAGLE / "config.json").read_text())
    assert (selector_config["selector_rank"], selector_config["selector_top_k"]) == (64, 16)
    tensors = load_file(out / SELECTOR_FOLDER / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in tensors.items() if "scale" not in name)
    words = " ".join(ran.stdout.split())
    assert "4,000 drafts recorded" in words and "wrote" in words
    assert "K = 3, held-out prompts: AL 1.810 before, 2.050 after (+13.3%), a gain of 0.240 ± 0.023" in words
    assert fakes.measured == [(False, 3), (True, 3)]


def test_what_is_no_better_is_not_written(tmp_path: Path, sharpen: Callable, fakes: Engines):
    fakes.gain = -0.075  # a gain within its error
    ran = sharpen()
    assert ran.exit_code == 1
    assert f"no better than {PEAGLE} on held-out prompts: nothing is written" in ran.stderr
    assert left(tmp_path) == []


def test_unusable_input_is_one_line(tmp_path: Path, sharpen: Callable):
    (tmp_path / "out").mkdir()
    assert "out exists; name a folder that does not" in only_line(sharpen())
    (tmp_path / "out").rmdir()
    few = tmp_path / "few.txt"
    few.write_text("".join(f"question {i}\n" for i in range(45)))
    assert "36 prompts to learn from, at least 40 are needed" in only_line(sharpen("--prompts", few))
    few.write_text("one\ntwo\n")
    assert "2 prompts to measure with, at least 8 are needed" in only_line(sharpen("--held-out", few))
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((TARGET / "config.json").read_bytes())
    assert "has no tokenizer that can be read" in only_line(sharpen("--target", bare))
    assert left(tmp_path) == ["bare", "few.txt"]


@pytest.mark.parametrize("file", ["0.safetensors", "model.safetensors"])
def test_a_full_disk_is_one_line(file: str, tmp_path: Path, sharpen: Callable, monkeypatch: pytest.MonkeyPatch):
    """While the trace or the selector is written."""

    def write(path: Path, data: bytes, original: Callable = Path.write_bytes) -> int:
        if file in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(path, data)

    monkeypatch.setattr(Path, "write_bytes", write)
    assert "cannot be written (No space left on device)" in only_line(sharpen())
    assert left(tmp_path) == []


def test_prompts_are_mixed_and_none_is_on_both_sides():
    prompts = [[{"role": "user", "content": str(i % 350)}] for i in range(400)]
    learned, aside = split(prompts, None)
    assert len(aside) == HELD_OUT
    assert not any(prompt in learned for prompt in aside)
    assert learned != sorted(learned, key=str)
    assert [len(part) for part in split(prompts[:82], None)] == [66, 16]
    learned, aside = split(prompts, prompts[:3])
    assert aside == prompts[:3] and not any(prompt in learned for prompt in aside)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_engines_process_ends_with_the_command(tmp_path: Path, how: signal.Signals):
    """However that ends. A spawned process would live on, with all its memory, or be waited for."""
    there = tmp_path / "there"
    task = f"import pathlib, time; pathlib.Path({str(there)!r}).touch(); time.sleep(600)"
    begin = "from peagle_tools.shared import engines, terminal; terminal.exit_on_sigterm()"
    code = f"{begin}; engines.in_process(exec, {task!r})"
    killed = psutil.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    while not there.exists():
        time.sleep(0.05)
    children = killed.children()
    killed.send_signal(how)
    killed.wait(20)
    assert children and not psutil.wait_procs(children, 20)[1]


def test_an_error_that_cannot_be_sent_keeps_its_reason():
    """As those of vLLM's configs cannot."""
    task = "class Unsent(Exception):\n    __reduce__ = None\nraise Unsent('max_model_len is too long')"
    with pytest.raises(ToolError, match=r"cannot run this pair \(max_model_len is too long\)"):
        engines.in_process(exec, task)


@pytest.mark.full
def test_the_shipped_pair_for_real(tmp_path: Path):
    """120 prompts are too few to gain much: what counts is that vLLM records, serves and measures."""
    texts = [json.dumps({"prompt": text[:size]}) for size in (400, 120) for text in heldout()][:128]
    file, aside = tmp_path / "prompts.jsonl", tmp_path / "aside.jsonl"
    file.write_text("\n".join(texts))
    aside.write_text("\n".join(texts[:8]))
    out = tmp_path / "out"
    options = ("--target", TARGET, "--prompts", file, "--held-out", aside, "-k", 3, "--max-tokens", 32)
    engine = {"dtype": "float32", "kv_cache_memory_bytes": 256 << 20}
    ran = run("sharpen", PEAGLE, out, *options, "--engine", json.dumps(engine))
    assert ran.exit_code in (0, 1), ran.stderr
    drafts, before, after = re.search(r"^(\d+|\d,\d+) drafts .*AL (\S+) before, (\S+) after", ran.stdout, re.S).groups()
    assert int(drafts.replace(",", "")) > 800 and 2 < float(before) < 4 and 2 < float(after) < 4
    assert out.exists() == (ran.exit_code == 0)
    if ran.exit_code == 0:
        assert read_selector_config(read_head(out).config, "") is not None
