"""From prompts to a served head, step by step; finished ones are skipped."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peagle_tools.shared.atomic_files import locked, write_whole
from peagle_tools.shared.errors import ToolError
from peagle_tools.train.peagle_yaml import STAMP, Config

NOTES = "steps.json"
MEMORY_OPTIONS = {"gpu_memory_utilization", "kv_cache_memory_bytes", "max_num_seqs", "max_num_batched_tokens"}
SPECULATORS = "0.9.0"  # as pyproject.toml pins it: classes of it are overridden, and some of its functions replaced

# Where each step's function is, imported when it runs; what the step writes, and --from removes.
STEPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "prompts": ("collect_prompts", ("prompts.jsonl", "prompts.sampled.jsonl")),
    "answers": ("steps", ("answers.jsonl", "answers.errors.jsonl")),
    "data": ("steps", ("data",)),
    "states": ("steps", ("data/hidden_states", f"data/{STAMP}")),
    "run": ("training", ("checkpoints", "log.jsonl", "al.jsonl")),
    "check": ("check", ()),
}


def do(step: str, config: Config) -> None:
    """Do a step in this process, and print what it did. ToolError where it fails, or cannot with this speculators."""
    if report := getattr(_module(step), step)(config):
        print(f"{step}: {report}", flush=True)


@contextmanager
def alone(folder: Path, is_first: bool = True) -> Iterator[None]:
    """Hold a run's folder, made if missing; ToolError where another process does. ``is_first``: of torchrun's."""
    folder.mkdir(parents=True, exist_ok=True)
    busy = ToolError(f"{folder}: another process is at work there; wait for its end")
    with locked(folder, busy) if is_first else nullcontext():
        yield


def _module(step: str) -> Any:
    if (installed := version("speculators")) != SPECULATORS:
        remedy = f"pip install --no-deps speculators=={SPECULATORS} hs-connectors=={SPECULATORS}"
        raise ToolError(f"speculators {installed} is installed, and training is made for {SPECULATORS}: {remedy}")
    return import_module(f"peagle_tools.train.{STEPS[step][0]}")


def pipeline(file: Path, config: Config, begin: str | None) -> None:
    """Do every step that is not finished, in order, and those from ``begin`` on again.

    ToolError where a step fails or was begun with other settings, or another process is at work in the folder;
    TryAgain where a step was stopped.
    """
    with alone(config.run):
        # A digest of the settings that each step was begun with, and whether it is finished.
        notes = json.loads((config.run / NOTES).read_text()) if (config.run / NOTES).exists() else {}
        _module("run").to_options(config)  # what it would refuse after hours of other steps
        inputs = ""
        for step, used in settings(config).items():
            if step == begin:  # what comes before is finished, and of these settings
                _forget(config.run, notes, list(STEPS)[list(STEPS).index(begin) :])
            inputs = hashlib.sha256((inputs + json.dumps(used, sort_keys=True)).encode()).hexdigest()
            before, is_finished = notes.get(step, (inputs, False))
            is_begun = is_finished or any((config.run / name).exists() for name in STEPS[step][1])  # else in vain
            if before != inputs and is_begun:
                again = f"`--from {step}` does it and what follows again; or put the settings back"
                raise ToolError(f"{step} was begun with other settings or data than {file} has now: {again}")
            if is_finished:
                print(f"{step}: finished before", flush=True)
                continue
            _write_notes(config.run, notes | {step: (inputs, False)})
            print(f"{step}: begins", flush=True)
            do(step, config)
            notes[step] = inputs, True
            _write_notes(config.run, notes)


def settings(config: Config) -> dict[str, Any]:
    """What decides the output of each step, next to the output of the step before it."""
    data = config.data.model_dump(mode="json", include={"prompts", "apart_from", "from_target", "sampling"})
    files = [Path(name) for name in data["prompts"] + data["apart_from"] if Path(name).is_file()]
    contents = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    engine = {name: value for name, value in config.engine.items() if name not in MEMORY_OPTIONS}
    return {
        "prompts": [config.target, data, contents, config.optimizer.seed],
        "answers": [config.data.max_tokens, engine | {"dtype": config.target_dtype}],
        "data": config.data.held_out,
        "states": config.stamp if config.data.states == "files" else "in memory",
        "run": config.training,
        "check": config.ks,
    }


def _forget(folder: Path, notes: dict[str, Any], steps: list[str]) -> None:
    """Remove what steps wrote. Killed meanwhile, they are unfinished, and still of their settings."""
    notes |= {step: (notes[step][0], False) for step in steps if step in notes}
    _write_notes(folder, notes)
    for path in (folder / name for step in reversed(steps) for name in STEPS[step][1]):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def _write_notes(folder: Path, notes: dict[str, Any]) -> None:
    write_whole(folder / NOTES, json.dumps(notes, indent=2) + "\n")
