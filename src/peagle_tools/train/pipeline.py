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
from pathlib import Path
from typing import Any

from peagle_tools.shared import processes
from peagle_tools.shared.atomic_files import locked, write_whole
from peagle_tools.shared.errors import ToolError, TryAgain
from peagle_tools.train import serve
from peagle_tools.train.peagle_yaml import LOOP, STAMP, Config

WRITES = {  # what each step writes, and --from removes
    "prompts": ("prompts.jsonl", "prompts.sampled.jsonl", "prompts.dropped.jsonl", "prompts.report.json"),
    "answers": ("answers.jsonl", "answers.errors.jsonl"),
    "data": ("data",),
    "states": ("data/hidden_states", f"data/{STAMP}"),
    "run": ("checkpoints", "log.jsonl", "al.jsonl"),
    "check": (),
}
MODULES = {  # where each step's function is, imported when it runs
    "prompts": "collect_prompts",
    "answers": "steps",
    "data": "steps",
    "states": "steps",
    "run": "training",
    "check": "check",
}


def do(step: str, config: Config) -> None:
    """Do a step in this process, and print what it did."""
    if report := getattr(import_module(f"peagle_tools.train.{MODULES[step]}"), step)(config):
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
            for step in reversed(list(WRITES)[list(WRITES).index(begin) :]):
                _forget(config.run, step)
        inputs, used = "", settings(config)
        for step in WRITES:
            inputs = hashlib.sha256((inputs + json.dumps(used[step], sort_keys=True)).encode()).hexdigest()
            stamp = config.run / f"steps/{step}.json"
            found = json.loads(stamp.read_text()) if stamp.exists() else {"inputs": inputs, "finished": False}
            left = any((config.run / name).exists() for name in WRITES[step])  # else it was begun in vain
            if found["inputs"] != inputs and (left or found["finished"]):
                again = f"`--from {step}` does it and what follows again; or put the settings back"
                raise ToolError(f"{step} was begun with other settings or data than {file} has now: {again}")
            if found["finished"]:
                print(f"{step}: finished before", flush=True)
                continue
            found = {"inputs": inputs, "finished": False}
            _write(stamp, found)
            print(f"{step}: begins", flush=True)
            began = time.monotonic()
            if status := run(step, file, config):
                return status
            _write(stamp, {**found, "finished": True, "seconds": round(time.monotonic() - began)})
    return 0


def settings(config: Config) -> dict[str, Any]:
    """What decides the output of each step, beside the step before it."""
    parts = config.data, config.head, config.step, config.optimizer
    data, head, step, optimizer = (part.model_dump(mode="json") for part in parts)
    selector = [config.selector.model_dump()] if config.selector else []
    read, apart = ({name: _content(Path(name)) for name in data[key]} for key in ("prompts", "apart_from"))
    # "drop" and ``shard`` were settings once: folders of that time stay readable.
    written = [data[key] for key in ("from_target", "systems", "languages", "sampling")]
    written += [config.target, config.optimizer.seed]
    answers = {key: data[key] for key in ("held_out", "max_tokens", "temperature")}
    engine = {key: value for key, value in config.engine.items() if key != "dtype"}
    return {
        "prompts": [read, data["pii"], "drop", data["ner"], *filter(None, [apart, data["from_target"] and written])],
        "answers": [answers, config.target, config.target_dtype, engine, config.optimizer.seed, LOOP],
        "data": [data["long"], step["tokens"] if data["long"] == "refuse" else None],
        "states": [config.stamp, data["online"]],
        "run": [head, step, optimizer | {"shard": False}, config.speculators, *selector],
        "check": [config.ks],
    }


def _content(file: Path) -> str | None:
    """A digest of a file; None for a data set of the hub."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def _forget(folder: Path, step: str) -> None:
    """Remove what a step wrote. Killed meanwhile, the step is unfinished, and still of its settings."""
    stamp = folder / f"steps/{step}.json"
    if stamp.exists():
        _write(stamp, {**json.loads(stamp.read_text()), "finished": False})
    for path in (folder / name for name in WRITES[step]):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    stamp.unlink(missing_ok=True)


def _write(stamp: Path, content: dict[str, Any]) -> None:
    stamp.parent.mkdir(exist_ok=True)
    write_whole(stamp, json.dumps(content, indent=2) + "\n")
