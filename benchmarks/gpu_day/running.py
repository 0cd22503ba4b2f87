"""One part after the other, in slices of time: every finished result is kept, and no finished part is run twice.

A slice is the time that a machine gives to one command. A part begins where at least half of its limit is left of the
slice; if the slice ends first, it is begun again in the next one. So is a part in which the driver itself was killed.
A part that was cut off twice has failed, like one that ends with an error or outlasts its limit; the next one runs all
the same. What a part had finished when it was cut off stays its result until another try has more.
"""

import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks import arms, gpu_day
from benchmarks.gpu_day.parts import OUTCOMES, Part
from peagle_tools.shared import processes

FILE, LOG, SCRATCH = "gpu-day.json", "gpu-day.log", "parts"  # in the folder of results
TRIES = 2
LOG_CHARACTERS, REASON_CHARACTERS = 200_000, 400  # kept of each part's log; of a failed test's message
BAD = ("failure", "error")  # outcomes of a test that did not pass

Entry = dict[str, Any]


def read(folder: Path) -> dict[str, Entry]:
    """What is known of each part, by its name; of one in which the driver was killed, what it had finished too."""
    file = folder / FILE
    try:
        known = json.loads(file.read_text())["parts"] if file.exists() else {}
    except (ValueError, TypeError, KeyError) as error:
        raise SystemExit(f"{file}: not written by this script ({error!r}); choose another --out") from None
    for name, entry in known.items():
        if entry["state"] == "running":
            keep_finished(entry, result_of(entry["command"], scratch_of(folder, name)))
    return known


def scratch_of(folder: Path, name: str) -> Path:
    """Where the part of this name writes."""
    return folder / SCRATCH / "".join(c if c.isalnum() else "-" for c in name)


def keep_finished(entry: Entry, result: Any) -> None:
    """Give ``entry`` this result, unless it has one with as many tests or cells."""

    def finished(result: Any) -> int:
        cells = result["cells"] if isinstance(result, dict) and "cells" in result else result
        return len(cells or ())

    if finished(result) > finished(entry.get("result")):
        entry["result"] = result


def run_parts(
    parts: Sequence[Part],
    folder: Path,
    seconds: float = math.inf,
    retry: bool = False,
    after_each: Callable[[dict[str, Entry]], None] = lambda known: None,
) -> dict[str, Entry]:
    """Run the parts that are neither done nor failed. A part whose command has changed is a new part.

    Args:
        folder: of results; made if need be.
        seconds: of this slice.
        retry: run failed parts again.
        after_each: called with all entries whenever one has changed.

    Returns:
        Every part's entry: "command"; "state", one of done, failed, unable (something is not installed), cut and
        running (both of them to be begun again); "tries"; and where there is one "seconds", "error", "result".
    """
    folder.mkdir(parents=True, exist_ok=True)
    known, deadline = read(folder), time.monotonic() + seconds

    def keep(part: Part, entry: Entry) -> None:
        known[part.name] = {"kind": part.kind, "command": list(part.command)} | entry
        arms.write_result(folder / FILE, gpu_day.__doc__, {"parts": known})
        after_each(known)
        if entry["state"] != "running":
            took = f" in {entry['seconds']:.0f} s" if "seconds" in entry else ""
            print(
                f"{part.name}: {entry['state']}{took}" + (f": {entry['error']}" if "error" in entry else ""), flush=True
            )

    for part in parts:
        past = known.get(part.name, {})
        if past.get("command") != list(part.command):
            past = {}
        state = past.get("state")
        if state == "done" or (state == "failed" and not retry):
            continue
        tries = 1 + (past["tries"] if state in ("cut", "running") else 0)
        left = deadline - time.monotonic()
        if missing := part.missing():
            keep(part, {"state": "unable", "tries": 0, "error": f"needs {' and '.join(missing)}, not installed here"})
        elif tries > TRIES:
            keep(part, past | {"state": "failed", "error": f"cut off {TRIES} times"})
        elif left < part.limit / 2:
            print(f"{part.name}: waits for the next slice", flush=True)
        else:
            print(f"{part.name} ...", flush=True)
            before = past.get("result")
            keep(part, {"state": "running", "tries": tries} | ({"result": before} if before else {}))
            entry = {"tries": tries} | run(part, folder, left)
            if entry["state"] != "done":
                keep_finished(entry, before)
            keep(part, entry)
    return known


def run(part: Part, folder: Path, left: float) -> Entry:
    """One part in a process of its own, for at most ``left`` seconds."""
    scratch = scratch_of(folder, part.name)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    log, began = scratch / "log", time.monotonic()
    words = [word.replace("OUT.", f"{scratch.resolve()}/out.") for word in part.command]
    env = arms.environment(part.env) | {"VLLM_LOGGING_LEVEL": "INFO"}  # for the log that is kept
    process = processes.start([sys.executable, "-m", *words], cwd=arms.ROOT, env=env, log=log)
    try:
        code = process.wait(min(part.limit, left))
    except psutil.TimeoutExpired:
        code = None
    finally:
        processes.end(process, patience=5)
    entry: Entry = {"seconds": round(time.monotonic() - began, 1)}
    with (folder / LOG).open("a") as merged:
        merged.write(f"\n===== {part.name} =====\n{log.read_text(errors='replace')[-LOG_CHARACTERS:]}")
    if (result := result_of(part.command, scratch)) is not None:
        entry["result"] = result
    if code is None and left < part.limit:
        return entry | {"state": "cut", "error": "the slice was over"}
    if code is None:
        error = f"took longer than its limit of {part.limit:.0f} s"
    elif code:
        error = failed_test(result) or processes.failure_reason(log)
    elif result is None:
        error = "left no result"
    else:
        return entry | {"state": "done"}
    return entry | {"state": "failed", "error": error}


def result_of(command: Sequence[str], scratch: Path) -> Any:
    """What the process has written so far; None where there is nothing to be read."""
    try:
        if OUTCOMES in command:
            return tests_of(scratch / "out.jsonl") or None
        return json.loads((scratch / "out.json").read_text())
    except (OSError, ValueError):
        return None


def tests_of(outcomes: Path) -> dict[str, dict[str, Any]]:
    """Each finished test: "outcome", "message" where it did not pass, and its recorded properties."""
    *lines, _torn = outcomes.read_text().split("\n")  # killed within a line, the process left a part of it
    tests = [json.loads(line) for line in lines]
    return {test.pop("name"): test for test in tests}


def failed_test(result: Any) -> str:
    """The first failed test and its message, in one line; nothing where the result is not of tests."""
    tests = result.items() if isinstance(result, dict) else ()
    failed = [(name, test) for name, test in tests if isinstance(test, dict) and test.get("outcome") in BAD]
    if not failed:
        return ""
    name, test = failed[0]
    message = " ".join(test["message"].split())[:REASON_CHARACTERS]
    return f"{len(failed)} of {len(tests)} tests failed; {name}: {message}"
