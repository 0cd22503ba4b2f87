"""From prompts to a served head, step by step; finished ones are skipped."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peagle_tools.shared import processes
from peagle_tools.shared.atomic_files import locked, write_whole
from peagle_tools.shared.errors import ToolError, TryAgain
from peagle_tools.train import serve
from peagle_tools.train.peagle_yaml import LOOP, STAMP, Config

SPECULATORS = "0.9.0"  # as pyproject.toml pins it: classes of it are overridden, and some of its functions replaced


# Where each step's function is, imported when it runs; what the step writes, and --from removes.
STEPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "prompts": (
        "collect_prompts",
        ("prompts.jsonl", "prompts.sampled.jsonl", "prompts.dropped.jsonl", "prompts.report.json"),
    ),
    "answers": ("steps", ("answers.jsonl", "answers.errors.jsonl")),
    "data": ("steps", ("data",)),
    "states": ("steps", ("data/hidden_states", f"data/{STAMP}")),
    "run": ("training", ("checkpoints", "log.jsonl", "al.jsonl")),
    "check": ("check", ()),
}


def do(step: str, config: Config) -> None:
    """Do a step in this process, and print what it did.

    Raises:
        ToolError: it fails, or another version of speculators is installed.
    """
    if (installed := version("speculators")) != SPECULATORS:
        remedy = f"pip install --no-deps speculators=={SPECULATORS} hs-connectors=={SPECULATORS}"
        raise ToolError(f"speculators {installed} is installed, and training is made for {SPECULATORS}: {remedy}")
    module = import_module(f"peagle_tools.train.{STEPS[step][0]}")
    if report := getattr(module, step)(config):
        print(f"{step}: {report}", flush=True)


def do_in_turn(step: str, file: Path, config: Config) -> int:
    """Do a step and return its exit status. Training is a process, whose memory is free again when it ends."""
    if step != "run":
        do(step, config)
        return 0
    log = config.run / "logs/states-server.log"
    with serve.running(config, log, hidden_states=True) if config.data.online else nullcontext():
        command = processes.bound([sys.executable, "-m", "peagle_tools.cli", "train", "run", str(file)])
        status = _run(command)
    if status < 0:
        raise TryAgain(f"{step} was {processes.how_it_ended(status)}; the same command continues")
    return status


def _run(command: list[str]) -> int:
    """Run a command to its end, which our signals ask it for, once each; its exit status.

    In a session of its own, or the terminal would send it Ctrl+C too, and a second one ends it at once.
    """
    process = subprocess.Popen(command, start_new_session=True)
    ends = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda number, _: process.send_signal(number)) for number in ends}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def pipeline(
    file: Path, config: Config, begin: str | None, run: Callable[[str, Path, Config], int] = do_in_turn
) -> int:
    """Run every step that is not finished, in order; the exit status of the first that fails, or 0.

    Args:
        begin: this step and the later ones are done again.
        run: does a step and returns its exit status.

    Raises:
        ToolError: a step fails, or was begun with other settings; another pipeline is at work in the folder.
        TryAgain: a step was stopped or killed.
    """
    config.run.mkdir(parents=True, exist_ok=True)
    with locked(config.run, ToolError(f"{config.run}: another pipeline is at work there; wait for its end")):
        if begin:
            for step in reversed(list(STEPS)[list(STEPS).index(begin) :]):
                _forget(config.run, step)
        inputs, used = "", settings(config)
        for step, (_, writes) in STEPS.items():
            inputs = hashlib.sha256((inputs + json.dumps(used[step], sort_keys=True)).encode()).hexdigest()
            stamp = _read_stamp(config.run, step)
            left = any((config.run / name).exists() for name in writes)  # else it was begun in vain
            if stamp["inputs"] not in (inputs, None) and (left or stamp["finished"]):
                again = f"`--from {step}` does it and what follows again; or put the settings back"
                raise ToolError(f"{step} was begun with other settings or data than {file} has now: {again}")
            if stamp["finished"]:
                print(f"{step}: finished before", flush=True)
                continue
            _write_stamp(config.run, step, {"inputs": inputs, "finished": False})
            print(f"{step}: begins", flush=True)
            began = time.monotonic()
            if status := run(step, file, config):
                return status
            seconds = round(time.monotonic() - began)
            _write_stamp(config.run, step, {"inputs": inputs, "finished": True, "seconds": seconds})
    return 0


def settings(config: Config) -> dict[str, Any]:
    """What decides the output of each step, next to the output of the step before it."""
    parts = config.model_dump(mode="json")
    data, optimizer = parts["data"], parts["optimizer"]
    selector = [parts["selector"]] if config.selector else []
    read, apart = ({name: _content(Path(name)) for name in data[key]} for key in ("prompts", "apart_from"))
    # What is constant here was a setting once: folders of that time stay readable.
    written = [data["from_target"], [], [], data["sampling"], config.target, optimizer["seed"]]
    answers = {key: data[key] for key in ("held_out", "max_tokens", "temperature")}
    engine = {key: value for key, value in config.engine.items() if key != "dtype"}
    return {
        "prompts": [read, data["pii"], "drop", data["ner"], *filter(None, [apart, data["from_target"] and written])],
        "answers": [answers, config.target, config.target_dtype, engine, optimizer["seed"], LOOP],
        "data": ["refuse", config.step.tokens],
        "states": [config.stamp | {"backend": "file"}, data["online"]],
        "run": [parts["head"], parts["step"], optimizer | {"shard": False}, config.speculators, *selector],
        "check": [config.ks],
    }


def _content(file: Path) -> str | None:
    """A digest of a file; None for a data set of the hub."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def _forget(folder: Path, step: str) -> None:
    """Remove what a step wrote. Killed meanwhile, the step is unfinished, and still of its settings."""
    _write_stamp(folder, step, {**_read_stamp(folder, step), "finished": False})
    for path in (folder / name for name in STEPS[step][1]):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _read_stamp(folder: Path, step: str) -> dict[str, Any]:
    """Digest of the settings that a step was begun with, None where it was not, and whether it is finished."""
    file = folder / f"steps/{step}.json"
    return json.loads(file.read_text()) if file.exists() else {"inputs": None, "finished": False}


def _write_stamp(folder: Path, step: str, stamp: dict[str, Any]) -> None:
    (folder / "steps").mkdir(exist_ok=True)
    write_whole(folder / f"steps/{step}.json", json.dumps(stamp, indent=2) + "\n")
