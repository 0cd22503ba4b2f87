"""From prompts to a served head: every step a process of its own; finished ones are skipped."""

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peagle_tools.shared import processes
from peagle_tools.shared.files import write_whole
from peagle_tools.shared.provenance import versions
from peagle_tools.train import TrainError, TryAgain, serve
from peagle_tools.train.config import STAMP, Config

WRITES = {  # what each step writes, and --from removes
    "prompts": ("prompts.jsonl", "prompts.sampled.jsonl", "prompts.dropped.jsonl", "prompts.report.json"),
    "answers": ("answers.jsonl", "answers.errors.jsonl"),
    "data": ("data",),
    "states": ("data/hidden_states", f"data/{STAMP}"),
    "run": ("checkpoints", "log.jsonl", "al.jsonl", "plots"),
    "check": (),
}


def pipeline(file: Path, config: Config, begin: str | None, run: Callable[[list[str]], int] | None = None) -> int:
    """Run every step that is not finished, in order; the exit status of the first that fails, or 0.

    Args:
        begin: this step and the later ones are done again.
        run: runs a command and returns its exit status.

    Raises:
        TrainError: a step was begun with other settings; another pipeline is at work in the folder.
        TryAgain: a step was killed.
    """
    config.run.mkdir(parents=True, exist_ok=True)
    run = run or (lambda command: subprocess.run(processes.bound(command), check=False).returncode)
    with _alone(config.run):
        if begin:
            for step in reversed(list(WRITES)[list(WRITES).index(begin) :]):
                _forget(config.run, step)
        inputs, used = "", settings(file, config)
        for step in WRITES:
            inputs = hashlib.sha256((inputs + json.dumps(used[step], sort_keys=True)).encode()).hexdigest()
            stamp = config.run / f"steps/{step}.json"
            found = json.loads(stamp.read_text()) if stamp.exists() else {"inputs": inputs, "finished": False}
            left = any((config.run / name).exists() for name in WRITES[step])  # else it was begun in vain
            if found["inputs"] != inputs and (left or found["finished"]):
                again = f"`--from {step}` does it and what follows again; or put the settings back"
                raise TrainError(f"{step} was begun with other settings or data than {file} has now: {again}")
            if found["finished"]:
                print(f"{step}: finished before", flush=True)
                continue
            used_now = {**versions(), "speculators": version("speculators")}
            found = {"inputs": inputs, "finished": False, "versions": used_now}
            _write(stamp, found)
            print(f"{step}: begins", flush=True)
            began = time.monotonic()
            online, log = step == "run" and config.data.online, config.run / "logs/states-server.log"
            with serve.running(config, log, hidden_states=True) if online else nullcontext():
                status = run([sys.executable, "-m", "peagle_tools.cli", *command(step, file, config)])
            if status < 0:
                raise TryAgain(f"{step} was {processes.how_it_ended(status)}; the same command goes on")
            if status:
                return status
            _write(stamp, {**found, "finished": True, "seconds": round(time.monotonic() - began)})
    return 0


def command(step: str, file: Path, config: Config) -> list[str]:
    """Arguments of ``peagle-vllm`` for a step."""
    if step != "prompts":
        return ["train", step, str(file)]
    data = config.data
    words = ["train", "prompts", *sources(file, data.prompts), "--out", str(config.run / "prompts.jsonl")]
    words += ["--pii", data.pii, "--pii-action", data.pii_action, *(["--pii-ner", data.ner] if data.ner else [])]
    if data.from_target:
        words += ["--from-target", str(data.from_target), "--config", str(file)]
    listed = {"system": data.systems, "language": data.languages, "apart-from": sources(file, data.apart_from)}
    return [*words, *(word for name, values in listed.items() for value in values for word in (f"--{name}", value))]


def sources(file: Path, names: list[str]) -> list[str]:
    """Data sets of prompts; those that are files, as paths."""
    paths = [(file.parent / name).resolve() for name in names]
    return [str(path) if path.is_file() else name for path, name in zip(paths, names, strict=True)]


def settings(file: Path, config: Config) -> dict[str, Any]:
    """What decides the output of each step, beside the step before it."""
    data, head, step = (part.model_dump(mode="json") for part in (config.data, config.head, config.step))
    read, apart = (
        {name: _content(Path(name)) for name in sources(file, data[key])} for key in ("prompts", "apart_from")
    )
    if not read and not data["from_target"]:
        raise TrainError(f"{file}: data.prompts: is empty; name files, or data sets of the hub, or set from_target")
    written = [data[key] for key in ("from_target", "systems", "languages", "sampling")]
    written += [config.target, config.optimizer.seed]
    answers = {key: data[key] for key in ("held_out", "max_tokens", "temperature")}
    engine = {key: value for key, value in config.engine.items() if key != "dtype"}
    return {
        "prompts": [
            *(read, data["pii"], data["pii_action"], data["ner"]),
            *filter(None, [apart, data["from_target"] and written]),
        ],
        "answers": [answers, config.target, config.target_dtype, engine, config.optimizer.seed],
        "data": [data["long"], step["tokens"] if data["long"] == "refuse" else None],
        "states": [config.stamp, data["online"]],
        "run": [head, step, config.optimizer.model_dump(mode="json"), config.speculators, *filter(None, [data["mix"]])],
        "check": [config.ks],
    }


def _content(file: Path) -> str | None:
    """A digest of a file; None for a data set of the hub."""
    if not file.is_file():
        return None
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


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


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One pipeline at a time works in a folder."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TrainError(f"{folder}: another pipeline is at work there; wait for its end") from None
        yield
