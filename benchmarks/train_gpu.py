"""``peagle-vllm train`` within a time: parts of ``benchmarks.gpu_day``.

The target writes prompts and answers them. Heads are trained from hidden states in memory, for as many steps as there
is time for by the speed of the first ones, so that the rate ends at 0. Each part continues what an earlier call, or an
earlier part, has left in the folder of the run. Without a GPU: tiny models.
"""

import io
import json
import lzma
import os
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from benchmarks import arms, real_gpu
from benchmarks.arms import HAS_GPU
from benchmarks.real import PROMPTS, SETS, TARGET, Engine
from peagle_tools.train import serve
from peagle_tools.train.lines import add_line, read_lines, write_lines
from peagle_tools.train.peagle_yaml import Config
from peagle_tools.train.pipeline import do

STEPS_SECONDS = 280 if HAS_GPU else 0  # of both heads, side by side
FIRST_STEPS = 31 if HAS_GPU else 2  # the speed of the last of these says how many there are
FEWEST_STEPS, MEASURED = (12, 2) if HAS_GPU else (4, 2)  # steps; how often acceptance is measured
MOST_TOKENS = 20.2e6  # of answers that a head sees: 20 million are the goal
K = 7 if HAS_GPU else 4
PIECE = 15 << 20  # bytes of a file that comes back
# Answers of the same target from elsewhere, rows of answers.jsonl; several such files may be joined.
ANSWERS = arms.ROOT / f".cache/{'answers' if HAS_GPU else 'tiny-answers'}.jsonl.xz"
EAGLE3_FOLDER = "eagle3"  # of that head, in the folder of a run
# What starts without compiling.
ENGINE = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}} if HAS_GPU else {}
SETTINGS: dict[str, Any] = (
    {
        "target": str(TARGET),
        "data": {
            "from_target": 2000,
            "apart_from": [str(PROMPTS / f"{name}.jsonl") for name in SETS],
            "max_tokens": 512,
            "held_out": 128,
            "concurrency": 512,
            "states": "memory",
        },
        "head": {"layers": 4, "depths": 8, "draft_vocab": 8192, "init": "target"},
        "step": {"tokens": 32768, "cod": [0.6, 0.15], "chunk_rows": 65536},  # few operations: the CPU bounds a step
        "engine": {"max_model_len": 2048, "max_num_seqs": 512, "gpu_memory_utilization": 0.5, **ENGINE},
    }
    if HAS_GPU
    else {
        "target": str(arms.ROOT / "models/tiny-llama"),
        "data": {"from_target": 16, "max_tokens": 32, "held_out": 2, "states": "memory"},
        "head": {"layers": 1, "depths": 4},
        "step": {"tokens": 256, "dtype": "float32"},
        "engine": {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "kv_cache_memory_bytes": 128 << 20},
    }
)
# Without the fused loss, which tries dozens of compiled kernels first.
SETTINGS |= {
    "selector": {"rank": 64},
    "optimizer": {"name": "muon", "lr": 1e-3, "steps": FIRST_STEPS},
    "speculators": {
        "muon_lr": 0.015 if HAS_GPU else 0.01,  # larger steps than those of models/real
        "embed_requires_grad": False,
        "log_freq": 10 if HAS_GPU else 1,  # a step that is logged waits for the GPU six times
        "loss_implementation": "eager",
    },
}


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


def answers(place: str) -> Iterator[dict[str, Any]]:
    """The target's own prompts and its answers, which come back: a cell for each step.

    Args:
        place: a file in whose folder logs, and what comes back, are kept; $OUT, if there is one, gets the latter.
    """
    config, stages = begin(place)
    since = time.monotonic()
    with serve.running(config, Path(place).with_name("server.log")) as (endpoint, _):
        yield stages.keep("server", since)
        for step in ("prompts", "answers"):
            since = time.monotonic()
            do(step, changed(config, data={"endpoint": endpoint}))
            yield stages.keep(step, since)
    file = config.run / "answers.jsonl"
    came_back(place).joinpath("answers.jsonl.xz").write_bytes(lzma.compress(file.read_bytes(), preset=1))


def data(place: str) -> Iterator[dict[str, Any]]:
    """Token ids of the answers, those of ``ANSWERS`` included: a cell."""
    config, stages = begin(place)
    since = time.monotonic()
    gather(config.run / "answers.jsonl")
    do("data", config)
    from datasets import load_from_disk
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

    rows = load_from_disk(str(config.data_folder)).with_format(None)
    rows = rows.select(range(len(rows) - config.data.held_out))
    packed = MultipackDistributedBatchSamplerV2(config.step.tokens, rows["seq_len"], 1, 0)
    tokens = sum(map(sum, rows["loss_mask"]))  # of the answers that are learned from; a step has so many in the mean
    yield stages.keep("data", since, tokens=tokens, **{"a step": round(tokens / len(packed))})


def train(place: str) -> Iterator[dict[str, Any]]:
    """A P-EAGLE head: cells of its steps, and one for each time that acceptance was measured."""
    config, stages = begin(place, after="data")
    yield from learn(config, stages, partial(do, "run"))
    for row in read_lines(config.run / "al.jsonl"):
        if row["K"] == max(config.ks) and row["how"] == "replay":
            seen = round(row["step"] * stages["data"]["a step"])
            yield {"tokens seen": seen, "K": row["K"], "AL, held out": row["al"]}


def train_eagle3(place: str) -> Iterator[dict[str, Any]]:
    """An EAGLE-3 head from the same documents: cells of its steps."""
    config, stages = begin(place, after="data")
    from benchmarks import train_eagle3 as library  # needs speculators, which other rungs do without

    yield from learn(library.of_eagle3(config), stages, library.train_eagle3, "EAGLE-3: ")


def check(place: str) -> Iterator[dict[str, Any]]:
    """Whether vLLM accepts what replay does of the P-EAGLE head's drafts."""
    config, stages = begin(place, after="run")
    since = time.monotonic()
    do("check", config)
    yield stages.keep("check", since)


def acceptance(place: str, drafter: str, lookup: int = 0) -> Iterator[dict[str, Any]]:
    """A trained head on the sets of ``benchmarks.real``, a cell for each; ``drafter`` is of a label, without K."""
    begin(place, after="EAGLE-3: run" if drafter == "EAGLE-3" else "run")
    yield from real_gpu.acceptance(Engine(trained(run_folder(place), drafter, lookup), **ENGINE))


def trained(run: Path, drafter: str, lookup: int = 0) -> real_gpu.GpuArm:
    """The arm of a head in the folder of a run."""
    is_eagle3 = drafter == "EAGLE-3"
    head = newest(run / EAGLE3_FOLDER) if is_eagle3 else run / "checkpoints/best"
    return real_gpu.GpuArm(drafter, str(head), K, stock=is_eagle3, selector=not is_eagle3, lookup=lookup)


def newest(run: Path) -> Path:
    """The folder of the newest head that speculators' trainer has saved in a run."""
    return max((run / "checkpoints").glob("[0-9]*"), key=lambda folder: int(folder.name), default=run / "none")


def run_folder(place: str) -> Path:
    """Where another call finds it."""
    return Path("/tmp/peagle-train") if HAS_GPU else Path(place).with_name("run")


def came_back(place: str) -> Path:
    """The folder for what comes back from a GPU host."""
    return Path(os.environ.get("OUT", Path(place).parent))


def begin(place: str, after: str = "") -> tuple[Config, Stages]:
    """Settings and finished steps of a run. SystemExit where the step ``after`` is not one of these."""
    run = run_folder(place)
    run.mkdir(parents=True, exist_ok=True)
    config = Config.model_validate({**SETTINGS, "folder": str(run)}, context=arms.ROOT)
    stages = Stages(run / "stages.jsonl")
    if after and after not in stages:
        raise SystemExit(f"{run}: the step {after!r} is not finished there; run its part first")
    return config, stages


def learn(config: Config, stages: Stages, run: Callable[[Config], Any], name: str = "") -> Iterator[dict[str, Any]]:
    """Train for as many steps as there is time for, by the speed of the first ones, or ``MOST_TOKENS`` of answers."""
    if f"{name}first steps" not in stages:
        since = time.monotonic()
        run(config)
        rows = steps_of(config)
        rate = tokens_per_second(config, rows[(len(rows) - 1) // 2 :])
        steps = min(STEPS_SECONDS * rate / config.step.tokens, MOST_TOKENS / stages["data"]["a step"])
        shutil.rmtree(config.run / "checkpoints")
        for log in ("log.jsonl", "al.jsonl"):
            (config.run / log).unlink(missing_ok=True)
        yield stages.keep(f"{name}first steps", since, rate=rate, steps=max(FEWEST_STEPS, int(steps)))
    steps, since = stages[f"{name}first steps"]["steps"], time.monotonic()
    run(changed(config, optimizer={"steps": steps}, every={"replay": -(-steps // MEASURED), "checkpoint": steps}))
    rows = steps_of(config)
    facts = {"tokens": round(steps * stages["data"]["a step"]), "steps": steps}
    facts |= {"rate": tokens_per_second(config, rows), "loss": rows[-1]["loss"]}
    yield stages.keep(f"{name}run", since, **facts, **{"peak GB": rows[-1]["peak_gb"]})


def steps_of(config: Config) -> list[dict[str, Any]]:
    """The lines of log.jsonl that are of steps."""
    return [row for row in read_lines(config.run / "log.jsonl") if "tokens/s" in row]


def tokens_per_second(config: Config, rows: list[dict[str, Any]]) -> int:
    """From the first to the last of these lines of log.jsonl."""
    first, last = rows[0], rows[-1]
    return round((last["step"] - first["step"]) * config.step.tokens / (last["time"] - first["time"]))


def changed(config: Config, **keys: Any) -> Config:
    """``config`` with other values; a dict changes some keys of a part."""
    old = config.model_dump()
    parts = {key: old[key] | value if isinstance(value, dict) else value for key, value in keys.items()}
    return Config.model_validate(old | parts)


def gather(file: Path) -> None:
    """Add the rows of ``ANSWERS`` to answers.jsonl, of which those stay that ``train answers`` has finished."""
    rows = {row["id"]: row for row in read_lines(file, must_exist=False) if "metadata" not in row}
    text = lzma.decompress(ANSWERS.read_bytes()) if ANSWERS.exists() else b""
    rows |= {row["id"]: row for row in map(json.loads, text.splitlines())}
    if not rows:
        raise SystemExit(f"{ANSWERS}: is not here, and the target has written no answers; run the part 'answers'")
    write_lines(file, rows.values())


def bring_back(folder: Path) -> None:
    """Copy logs and heads of a run, also of one that was cut off, to the folder of results; heads to $OUT if set.

    Each head is copied once, and one a call: both of them are more than a call may bring back.
    """
    place = str(folder / "place")
    run = run_folder(place)
    eagle3 = run / EAGLE3_FOLDER
    for name, of_head in (("head", run), (EAGLE3_FOLDER, eagle3)):
        for pattern in ("stages.jsonl", "al.jsonl", "log.jsonl", "logs/*.log"):
            for log in of_head.glob(pattern):
                shutil.copy(log, folder / f"{name}-{log.name}")
    for name, head in (("head", run / "checkpoints/best"), (EAGLE3_FOLDER, newest(eagle3))):
        copied = folder / f"{name}.copied"
        if not head.exists() or (copied.exists() and copied.read_text() == str(head.resolve())):
            continue
        try:
            keep_head(head, came_back(place) / f"{name}.tar")
            copied.write_text(str(head.resolve()))
            break
        except (OSError, SafetensorError) as error:  # its part was killed while it was written
            print(f"{head}: is not brought back, for it cannot be read: {error}", flush=True)


def keep_head(head: Path, to: Path) -> None:
    """Write what vLLM reads of a head to files of 15 MiB, TO.0, TO.1, ...: ``cat TO.* | tar x``.

    Its embeddings, which are the target's, are left out.
    """
    whole, weights = io.BytesIO(), load_file(head / "model.safetensors")
    weights.pop("embed_tokens.weight", None)
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for name in filter(lambda name: (head / name).exists(), ("config.json", "edge")):
            archive.add(head / name, f"head/{name}")
        entry, content = tarfile.TarInfo("head/model.safetensors"), save(weights, {"format": "pt"})
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    for number, at in enumerate(range(0, whole.tell(), PIECE)):
        Path(f"{to}.{number}").write_bytes(whole.getbuffer()[at : at + PIECE])
