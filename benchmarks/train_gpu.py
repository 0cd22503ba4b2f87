"""``peagle-vllm train`` within a time: parts of ``benchmarks.gpu_day``.

The target writes prompts and answers them until their share of the time is over, hidden states go to memory, and the
head is trained for as many steps as the rest holds by the speed of its first ones, so that its rate ends at 0. Called
again, it continues. Without a GPU: tiny models.
"""

import io
import itertools
import json
import lzma
import os
import shutil
import signal
import statistics
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import arms, real_gpu
from benchmarks.arms import HAS_GPU, SLOWER
from benchmarks.real import PROMPTS, SETS, TARGET, Engine
from peagle_tools.shared.atomic_files import write_whole
from peagle_tools.shared.server import HOST, free_port
from peagle_tools.train import serve
from peagle_tools.train.lines import read_lines, write_lines
from peagle_tools.train.peagle_yaml import Config
from peagle_tools.train.pipeline import STEPS, do

# In seconds: of all, of the target's prompts, of its answers, and what is left for the check behind the training.
SECONDS, PROMPTS_SECONDS, ANSWERS_SECONDS, CHECK_SECONDS = (
    (420 * SLOWER, 45, 140, 70 * SLOWER) if HAS_GPU else (600, 300, 300, 600)
)
FIRST_STEPS = 30 if HAS_GPU else 4  # whose speed says how many there are
FEWEST_STEPS, MEASURED = 12, 6  # steps; how often acceptance is measured
K = 7 if HAS_GPU else 4
PIECE = 15 << 20  # bytes of a file that comes back
SETTINGS: dict[str, Any] = (
    {
        "target": str(TARGET),
        "data": {
            "from_target": 60_000,  # more than there is time for
            "apart_from": [str(PROMPTS / f"{name}.jsonl") for name in SETS],
            "pii": "none",  # the target's own text
            "max_tokens": 512,
            "held_out": 128,
            "concurrency": 512,
        },
        "head": {"layers": 4, "depths": 8, "draft_vocab": 8192, "init": "target"},
        "step": {"tokens": 16384, "cod": [0.6, 0.15], "chunk_rows": 8192},
        "engine": {
            "max_model_len": 2048,
            "max_num_seqs": 512,
            "gpu_memory_utilization": 0.5,
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},  # starts without compiling
        },
    }
    if HAS_GPU
    else {
        "target": str(arms.ROOT / "models/tiny-llama"),
        "data": {"from_target": 40, "pii": "none", "max_tokens": 32, "held_out": 2},
        "head": {"layers": 1, "depths": 4},
        "step": {"tokens": 256, "dtype": "float32"},
        "engine": {
            "dtype": "float32",
            "max_model_len": 512,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 128 << 20,
        },
    }
)
SETTINGS |= {
    "selector": {"rank": 64},
    "optimizer": {"name": "muon", "lr": 1e-3, "steps": FIRST_STEPS},
    "speculators": {"muon_lr": 0.01, "embed_requires_grad": False, "num_workers": 0, "log_freq": 1},
}


class TimeOverError(Exception):
    """A step took all of its share."""


def train(place: str) -> Iterator[dict[str, Any]]:
    """A cell for each step, and one for each time that acceptance was measured.

    Args:
        place: a file where logs and answers go, too; the head goes in pieces to the folder $OUT, if there is one.
    """
    began, run, kept = time.monotonic(), run_folder(place), Path(place).parent
    run.mkdir(parents=True, exist_ok=True)
    for module, _ in STEPS.values():
        import_module(f"peagle_tools.train.{module}")  # an alarm in an import would leave it half done
    file = run / "stages.json"
    stages: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def finished(step: str, **facts: Any) -> dict[str, Any]:
        stages[step] = {"step": step, **facts}
        write_whole(file, json.dumps(stages))
        return stages[step]

    endpoint = f"http://{HOST}:{free_port()}/v1"
    config = Config.model_validate(
        {**SETTINGS, "folder": str(run), "data": {**SETTINGS["data"], "endpoint": endpoint}}, context=arms.ROOT
    )
    if "answers" not in stages:
        started = time.monotonic()
        with serve.running(config, run / "logs/server.log"):
            since = time.monotonic()
            yield finished("server", seconds=round(since - started))
            asked = changed(config, "data", serve=False)
            if not within(PROMPTS_SECONDS, "prompts", asked):
                asked = changed(asked, "data", from_target=num_sampled(run))
                do("prompts", asked)
            yield finished("prompts", seconds=round(time.monotonic() - since), of=asked.data.from_target)
            since = time.monotonic()
            if not within(ANSWERS_SECONDS, "answers", asked):
                keep_answered(run)
                do("answers", asked)
        tokens, learned = num_tokens(run)
        seconds = time.monotonic() - since
        yield finished(
            "answers", seconds=round(seconds), tokens=learned, rate=round(learned / seconds), share=learned / tokens
        )
    for step in ("data", "states"):
        if step not in stages:
            since = time.monotonic()
            do(step, config)
            yield finished(step, seconds=round(time.monotonic() - since))
    if "first steps" not in stages:
        since = time.monotonic()
        do("run", config)
        rates = [row["tokens/s"] for row in read_lines(run / "log.jsonl") if "tokens/s" in row][FIRST_STEPS // 2 :]
        rate, spent = statistics.median(rates), time.monotonic() - since
        left = SECONDS - CHECK_SECONDS - (time.monotonic() - began) - spent  # it starts once more
        steps = max(FEWEST_STEPS, int(0.85 * left * rate / config.step.tokens))  # the rest is for measuring
        for name in STEPS["run"][1]:
            path = run / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield finished("first steps", seconds=round(spent), rate=rate, steps=steps)
    steps = stages["first steps"]["steps"]
    config = changed(config, "optimizer", steps=steps)
    config = changed(config, "every", replay=-(-steps // MEASURED), checkpoint=steps)
    since = time.monotonic()
    do("run", config)
    log = [row for row in read_lines(run / "log.jsonl") if "tokens/s" in row]
    facts = {"rate": round(statistics.median(row["tokens/s"] for row in log)), "peak GB": log[-1]["peak_gb"]}
    facts |= {"loss": log[-1]["loss"], "steps": steps}
    seen = config.step.tokens * stages["answers"]["share"]
    yield finished("run", seconds=round(time.monotonic() - since), tokens=round(steps * seen), **facts)
    for row in read_lines(run / "al.jsonl"):
        if row["K"] == max(config.ks) and row["how"] == "replay":
            yield {"tokens seen": round(row["step"] * seen), "K": row["K"], "AL, held out": row["al"]}
    since = time.monotonic()
    for name in ("log.jsonl", "al.jsonl"):
        shutil.copy(run / name, kept / name)
    (kept / "answers.jsonl.xz").write_bytes(lzma.compress((run / "answers.jsonl").read_bytes(), preset=1))
    keep_head(run / "checkpoints/best", Path(os.environ.get("OUT", kept)))
    do("check", config)
    yield finished("check", seconds=round(time.monotonic() - since))


def changed(config: Config, part: str, **values: Any) -> Config:
    return config.model_copy(update={part: getattr(config, part).model_copy(update=values)})


def within(seconds: float, step: str, config: Config) -> bool:
    """Do a step for so long; whether it came to its end."""
    try:
        with alarm(seconds):
            do(step, config)
    except TimeOverError:
        return False
    return True


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raises TimeOverError in the block, in the main thread, after so long."""

    def ring(*_: Any) -> None:
        raise TimeOverError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def num_sampled(run: Path) -> int:
    """How many prompts the target has written without a gap in their numbers."""
    numbers = {row["number"] for row in read_lines(run / "prompts.sampled.jsonl", must_exist=False)}
    return next(number for number in itertools.count() if number not in numbers)


def keep_answered(run: Path) -> None:
    """Drop the prompts that have no answer yet."""
    answered = {row["primary_id"] for row in read_lines(run / "answers.jsonl")}
    write_lines(run / "prompts.jsonl", [row for row in read_lines(run / "prompts.jsonl") if row["id"] in answered])


def num_tokens(run: Path) -> tuple[int, int]:
    """Of all documents, and of their answers."""
    counts = [(len(row["input_ids"]), sum(row["loss_mask"])) for row in read_lines(run / "answers.jsonl")]
    return sum(tokens for tokens, _ in counts), sum(learned for _, learned in counts)


def keep_head(head: Path, folder: Path) -> None:
    """Write what vLLM reads of a head to head.tar.0, head.tar.1, ... in a folder: ``cat head.tar.* | tar x``."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for name in ("config.json", "model.safetensors", "model.safetensors.index.json", "edge"):
            archive.add(head / name, f"head/{name}")
    for number, at in enumerate(range(0, whole.tell(), PIECE)):
        (folder / f"head.tar.{number}").write_bytes(whole.getbuffer()[at : at + PIECE])


def run_folder(place: str) -> Path:
    """In memory on a GPU host."""
    return Path("/dev/shm/peagle-train") if HAS_GPU else Path(place).with_name("run")


def acceptance(place: str, lookup: int) -> Iterator[dict[str, Any]]:
    """The trained head on the sets of ``benchmarks.real``: a cell for each."""
    name, head = "P-EAGLE with look-up" if lookup else "P-EAGLE", (run_folder(place) / "checkpoints/best").resolve()
    arm = real_gpu.GpuArm(name, str(head), K, selector=True, lookup=lookup)
    arm.check()
    yield from real_gpu.acceptance(Engine(arm))
