"""``peagle-vllm train`` within a time: parts of ``benchmarks.gpu_day``.

The target writes prompts and answers them until their share of the time is over, hidden states go to memory, and the
head is trained for as many steps as the rest holds by the speed of its first ones, so that its rate ends at 0. Called
again, it continues. Without a GPU: tiny models.
"""

import io
import itertools
import lzma
import os
import shutil
import signal
import statistics
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import arms, real_gpu
from benchmarks.arms import HAS_GPU, SLOWER
from benchmarks.real import PROMPTS, SETS, TARGET, Engine
from peagle_tools.train import serve
from peagle_tools.train.lines import add_line, read_lines, write_lines
from peagle_tools.train.peagle_yaml import Config
from peagle_tools.train.pipeline import STEPS, do

# In seconds: of all, of the target's prompts, of its answers, and what is left for the check behind the training.
SECONDS, PROMPTS_SECONDS, ANSWERS_SECONDS, CHECK_SECONDS = (
    (420 * SLOWER, 45, 140, 70 * SLOWER) if HAS_GPU else (600, 300, 300, 600)
)
FIRST_STEPS = 30 if HAS_GPU else 2  # whose speed says how many there are
FEWEST_STEPS, MEASURED = (12, 6) if HAS_GPU else (4, 2)  # steps; how often acceptance is measured
K = 7 if HAS_GPU else 4
PIECE = 15 << 20  # bytes of a file that comes back
ANSWERS = arms.ROOT / ".cache/answers.jsonl.xz"
EAGLE3 = "eagle3"  # folder of that head in a run's
SETTINGS: dict[str, Any] = (
    {
        "target": str(TARGET),
        "data": {
            "from_target": 60_000,  # more than there is time for
            "apart_from": [str(PROMPTS / f"{name}.jsonl") for name in SETS],
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
        "data": {"from_target": 16, "max_tokens": 32, "held_out": 2},
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


class Stages(dict[str, dict[str, Any]]):
    """The cells of finished steps, by step; kept in a file."""

    def __init__(self, file: Path):
        self.file = file
        super().__init__((cell["step"], cell) for cell in read_lines(file, must_exist=False))

    def keep(self, step: str, since: float, **facts: Any) -> dict[str, Any]:
        """The cell of a step that began ``since`` and has ended."""
        self[step] = {"step": step, "seconds": round(time.monotonic() - since), **facts}
        add_line(self.file, self[step])
        return self[step]


def train(place: str) -> Iterator[dict[str, Any]]:
    """A P-EAGLE head: a cell for each step, and one for each time that acceptance was measured.

    Args:
        place: a file where logs and answers go, too; the head goes in pieces to the folder $OUT, if there is one.
    """
    began, run, kept = time.monotonic(), run_folder(place), Path(place).parent
    for module, _ in STEPS.values():
        import_module(f"peagle_tools.train.{module}")  # an alarm in an import would leave it half done
    config, stages = begin(run)
    if "answers" not in stages:
        yield from write_answers(config, stages)
    yield from prepare(config, stages)
    yield from learn(config, stages, began, partial(do, "run"))
    seen = config.step.tokens * stages["answers"]["share"]
    for row in read_lines(run / "al.jsonl"):
        if row["K"] == max(config.ks) and row["how"] == "replay":
            yield {"tokens seen": round(row["step"] * seen), "K": row["K"], "AL, held out": row["al"]}
    for name in ("log.jsonl", "al.jsonl"):
        shutil.copy(run / name, kept / name)
    (kept / ANSWERS.name).write_bytes(lzma.compress((run / "answers.jsonl").read_bytes(), preset=1))
    keep_head(run / "checkpoints/best", Path(os.environ.get("OUT", kept)) / "head.tar")
    since = time.monotonic()
    do("check", config)
    yield stages.keep("check", since)


def train_eagle3(place: str) -> Iterator[dict[str, Any]]:
    """An EAGLE-3 head from the same answers: those of ``train`` here, or what came back of it elsewhere in ANSWERS.

    Args:
        place: as in ``train``.
    """
    began, run, kept = time.monotonic(), run_folder(place), Path(place).parent
    config, stages = begin(run)
    if "answers" not in stages:
        if not ANSWERS.exists():
            raise SystemExit(f"{ANSWERS}: is not here; train P-EAGLE first, or put what it left there")
        (run / "answers.jsonl").write_bytes(lzma.decompress(ANSWERS.read_bytes()))
        yield stages.keep("answers", began, **num_tokens(run))
    yield from prepare(config, stages)
    from benchmarks import train_eagle3 as library  # needs speculators, which other rungs do without

    config = changed(config, folder=str(run / EAGLE3), **library.EAGLE3)
    config.run.mkdir(exist_ok=True)
    if not config.data_folder.exists():
        config.data_folder.symlink_to(run / "data")
    yield from learn(config, stages, began, library.train_eagle3, "EAGLE-3: ")
    shutil.copy(config.run / "log.jsonl", kept / "log-eagle3.jsonl")
    keep_head(library.newest(config.run), Path(os.environ.get("OUT", kept)) / "eagle3.tar")


def begin(run: Path) -> tuple[Config, Stages]:
    """Settings and finished steps of a run."""
    run.mkdir(parents=True, exist_ok=True)
    config = Config.model_validate({**SETTINGS, "folder": str(run)}, context=arms.ROOT)
    return config, Stages(run / "stages.jsonl")


def write_answers(config: Config, stages: Stages) -> Iterator[dict[str, Any]]:
    """The target's own prompts and its answers, each until its share of the time is over."""
    since = time.monotonic()
    with serve.running(config, config.run / "logs/server.log") as (endpoint, _):
        yield stages.keep("server", since)
        since, asked = time.monotonic(), changed(config, data={"endpoint": endpoint})
        if not within(PROMPTS_SECONDS, "prompts", asked):
            asked = changed(asked, data={"from_target": num_sampled(config.run)})
            do("prompts", asked)
        yield stages.keep("prompts", since, of=asked.data.from_target)
        since = time.monotonic()
        if not within(ANSWERS_SECONDS, "answers", asked):
            keep_answered(config.run)
            do("answers", asked)
        facts = num_tokens(config.run)
        yield stages.keep("answers", since, rate=round(facts["tokens"] / (time.monotonic() - since)), **facts)


def prepare(config: Config, stages: Stages) -> Iterator[dict[str, Any]]:
    """Token ids and hidden states of the answers."""
    for step in ("data", "states"):
        if step not in stages:
            since = time.monotonic()
            do(step, config)
            yield stages.keep(step, since)


def learn(
    config: Config, stages: Stages, began: float, run: Callable[[Config], Any], name: str = ""
) -> Iterator[dict[str, Any]]:
    """Train for as many steps as the time since ``began`` leaves, by the speed of the first ones."""
    if f"{name}first steps" not in stages:
        since = time.monotonic()
        run(config)
        rate = statistics.median(row["tokens/s"] for row in steps_of(config)[FIRST_STEPS // 2 :])
        spent = time.monotonic() - since  # it starts once more
        left = SECONDS - CHECK_SECONDS - (time.monotonic() - began) - spent
        steps = max(FEWEST_STEPS, int(0.85 * left * rate / config.step.tokens))  # the rest is for measuring
        shutil.rmtree(config.run / "checkpoints")
        for log in ("log.jsonl", "al.jsonl"):
            (config.run / log).unlink(missing_ok=True)
        yield stages.keep(f"{name}first steps", since, rate=rate, steps=steps)
    steps, since = stages[f"{name}first steps"]["steps"], time.monotonic()
    often = {"replay": -(-steps // MEASURED), "checkpoint": steps}
    run(changed(config, optimizer={"steps": steps}, every=often))
    rows = steps_of(config)
    facts = {"tokens": round(steps * config.step.tokens * stages["answers"]["share"]), "steps": steps}
    facts |= {"rate": round(statistics.median(row["tokens/s"] for row in rows)), "loss": rows[-1]["loss"]}
    yield stages.keep(f"{name}run", since, **facts, **{"peak GB": rows[-1]["peak_gb"]})


def steps_of(config: Config) -> list[dict[str, Any]]:
    """The lines of log.jsonl that are of steps."""
    return [row for row in read_lines(config.run / "log.jsonl") if "tokens/s" in row]


def changed(config: Config, **keys: Any) -> Config:
    """``config`` with other values; a dict changes some keys of a part."""
    values = {}
    for key, value in keys.items():
        old = getattr(config, key)
        if isinstance(value, dict):
            value = {**old, **value} if isinstance(old, dict) else old.model_copy(update=value)
        values[key] = value
    return config.model_copy(update=values)


def within(seconds: float, step: str, config: Config) -> bool:
    """Do a step for so long, in the main thread; whether it came to its end."""

    def ring(*_: Any) -> None:
        raise TimeOverError

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        do(step, config)
    except TimeOverError:
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return True


def num_sampled(run: Path) -> int:
    """How many prompts the target has written without a gap in their numbers."""
    numbers = {row["number"] for row in read_lines(run / "prompts.sampled.jsonl", must_exist=False)}
    return next(number for number in itertools.count() if number not in numbers)


def keep_answered(run: Path) -> None:
    """Drop the prompts that have no answer yet."""
    answered = {row["primary_id"] for row in read_lines(run / "answers.jsonl")}
    write_lines(run / "prompts.jsonl", [row for row in read_lines(run / "prompts.jsonl") if row["id"] in answered])


def num_tokens(run: Path) -> dict[str, Any]:
    """Of all answers, and what share of their documents that is."""
    counts = [(len(row["input_ids"]), sum(row["loss_mask"])) for row in read_lines(run / "answers.jsonl")]
    tokens, learned = (sum(column) for column in zip(*counts, strict=True))
    return {"tokens": learned, "share": learned / tokens}


def keep_head(head: Path, to: Path) -> None:
    """Write what vLLM reads of a head to files of 15 MiB, TO.0, TO.1, ...: ``cat TO.* | tar x``."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for name in ("config.json", "model.safetensors", "model.safetensors.index.json", "edge"):
            if (head / name).exists():
                archive.add(head / name, f"head/{name}")
    for number, at in enumerate(range(0, whole.tell(), PIECE)):
        Path(f"{to}.{number}").write_bytes(whole.getbuffer()[at : at + PIECE])


def run_folder(place: str) -> Path:
    """In memory on a GPU host."""
    return Path("/dev/shm/peagle-train") if HAS_GPU else Path(place).with_name("run")


def acceptance(place: str, drafter: str, lookup: int = 0) -> Iterator[dict[str, Any]]:
    """A trained head on the sets of ``benchmarks.real``: a cell for each.

    Args:
        drafter: of a label, without K.
    """
    yield from real_gpu.acceptance(Engine(trained(run_folder(place), drafter, lookup)))


def trained(run: Path, drafter: str, lookup: int = 0) -> real_gpu.GpuArm:
    """The arm of a head of a run."""
    if is_eagle3 := drafter == "EAGLE-3":
        from benchmarks.train_eagle3 import newest
    head = (newest(run / EAGLE3) if is_eagle3 else run / "checkpoints/best").resolve()
    return real_gpu.GpuArm(drafter, str(head), K, stock=is_eagle3, selector=not is_eagle3, lookup=lookup)
