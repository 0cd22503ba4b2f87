"""A GPU's first half hour, most valuable part first: ``python -m benchmarks.gpu_day [--slice SECONDS]``.

Each part is a process with a limit. Each finished test and cell is written at once to a file of its try, and is kept
whoever is killed. Call it again and again, on a host that cuts commands off with ``--slice`` a minute less than that:
parts that are done are not run again, one that was cut off is begun again. Without a GPU the same parts run at tiny
shapes, for rehearsal. The exit status is 0 once every part is done.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import psutil

from benchmarks import arms, draft_step, engine, kernels
from benchmarks.arms import HAS_GPU, call
from peagle_tools.shared import processes
from peagle_tools.shared.files import write_whole
from peagle_tools.shared.provenance import provenance

CELLS, TESTS = "OUT.json", "OUT.jsonl"  # in a command: the file that it writes finished cells, or tests, to
PYTEST = ("pytest", "-q", "-s", "-p", "no:cacheprovider", "-p", "benchmarks.outcomes", "--outcomes", TESTS)
# vLLM raises where a step makes the host wait for the GPU, once it has warmed up.
SYNC_CHECK = {"VLLM_GPU_SYNC_CHECK": "error"}
# (attention backend, how the engine runs it), as tests/gpu names them; "compiled" leaves the KV cache's size to vLLM.
MODES = [*product(("FLASH_ATTN", "TRITON_ATTN"), ("eager", "full", "compiled"))] if HAS_GPU else [("CPU_ATTN", "eager")]
DEPTHS, BATCHES = ((7, 5), (1, 4, 16, 64)) if HAS_GPU else ((3,), (1, 2))
ON_KERNELS = {"CUDA_LAUNCH_BLOCKING": "1"} if HAS_GPU else {"TRITON_INTERPRET": "1"}  # a fault names its launch
# How the names of parts begin that run before the others. The very first shows whether an engine starts here at all.
FIRST = ("drafts FLASH_ATTN full", "exact", "draft step K=7", "engine", "drafts FLASH_ATTN compiled")
# The tables of a page, by how the names of their parts begin.
PAGES = {"kernels": arms.table, "draft step": draft_step.page, "engine": engine.page}
STATE = "state.json"
TRIES = 2


@dataclass(frozen=True)
class Part:
    """One process: what follows ``python -m``, its limit in seconds, and its own environment variables."""

    name: str
    command: tuple[str, ...]
    limit: float = 240
    env: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in self.name)


def all_parts() -> list[Part]:
    """Every part, the most valuable first."""
    v2 = {"PEAGLE_TEST_ARM": "plugin-v2"} | SYNC_CHECK
    # A part for each kernel: hypothesis may compile a variant an example, 60 of them at up to 1.5 s.
    exact = ("prepare_inputs", "gather_hidden", "select_candidates", "limit_logits", "lookup_drafts")
    parts = [
        *(Part(f"exact {name}", (*PYTEST, f"tests/kernels/test_{name}.py"), env=ON_KERNELS) for name in exact),
        *(
            Part(f"drafts {backend} {mode}", (*PYTEST, "tests/gpu", "-k", f"{backend} and {mode}"), 360, v2)
            for backend, mode in MODES
        ),
        Part("kernels", call(kernels.run_all, CELLS)),
        *(
            Part(
                f"draft step K={k} {arm}", call(draft_step.run_arm, CELLS, arm=arm, k=k, batches=BATCHES), env=known.env
            )
            for k, (arm, known) in product(DEPTHS, draft_step.ARMS.items())
        ),
        *(
            Part(f"engine {arm}", call(engine.run_arm, CELLS, arm=arm, batches=BATCHES), 360, known.env)
            for arm, known in engine.ARMS.items()
            if HAS_GPU or not known.adaptive
        ),
    ]
    return sorted(parts, key=lambda part: next((i for i, name in enumerate(FIRST) if part.name.startswith(name)), 99))


def finished(file: Path) -> list[Any]:
    """The cells or tests in a file; one that was cut off within a line, or holds none, has those before it."""
    try:
        if file.suffix == ".jsonl":
            return [json.loads(line) for line in file.read_text().split("\n")[:-1]]
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return []


def best(part: Part, folder: Path) -> list[Any]:
    """What the try that got furthest has finished."""
    return max(map(finished, folder.glob(f"{part.label}.*.json*")), key=len, default=[])


def run_parts(parts: Sequence[Part], folder: Path, seconds: float = math.inf) -> dict[str, dict[str, Any]]:
    """Run what is not done. A part begins where at least half of its limit is left of the slice of ``seconds``.

    Where the first part finishes nothing, no other would: it ends there.

    Returns:
        By part name "state": done, failed, cut (by the slice's end) or running (the driver was killed), and "tries".
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = json.loads((folder / STATE).read_text()) if (folder / STATE).exists() else {}
    deadline = time.monotonic() + seconds

    def keep(part: Part, **entry: Any) -> None:
        state[part.name] = entry
        write_whole(folder / STATE, json.dumps(state, indent=1))
        print(f"{part.name}: " + ", ".join(map(str, entry.values())), flush=True)

    for part in parts:
        past = state.get(part.name, {"state": "", "tries": 0})
        left = deadline - time.monotonic()
        if past["state"] == "done" or left < part.limit / 2:
            continue
        if past["tries"] == TRIES:
            if past["state"] != "failed":
                keep(part, state="failed", tries=TRIES, error=f"cut off {TRIES} times")
            continue
        tries = past["tries"] + 1
        keep(part, state="running", tries=tries)
        keep(part, **run(part, folder, tries, left), tries=tries)
        if part is parts[0] and state[part.name]["state"] == "failed" and not best(part, folder):
            break
    return state


def run(part: Part, folder: Path, tries: int, left: float) -> dict[str, Any]:
    """One try of a part in a process of its own, for at most ``left`` seconds."""
    out, log = folder / f"{part.label}.{tries}", folder / f"{part.label}.{tries}.log"
    command = [sys.executable, "-m", *(word.replace("OUT.", f"{out.resolve()}.") for word in part.command)]
    env = arms.environment(part.env) | {"VLLM_LOGGING_LEVEL": "INFO"}
    process = processes.start(command, cwd=arms.ROOT, env=env, log=log)
    try:
        code = process.wait(min(part.limit, left))
    except psutil.TimeoutExpired:
        if left < part.limit:
            return {"state": "cut"}
        return {"state": "failed", "error": f"took longer than its limit of {part.limit:.0f} s"}
    finally:
        processes.end(process, patience=5)
    if code == 0 and best(part, folder):
        return {"state": "done"}
    return {"state": "failed", "error": processes.failure_reason(log)}


def page(parts: Sequence[Part], folder: Path, state: dict[str, dict[str, Any]]) -> str:
    """One page: what was exact, the tables of what there is, and what is not done."""
    found = {part.name: best(part, folder) for part in parts}
    lines = [json.dumps(provenance())]
    for name, tests in found.items():
        if name.startswith(("exact", "drafts")):
            passed = sum(test["outcome"] == "passed" for test in tests)
            rows = sum(int(test.get("rows", 0)) for test in tests)
            lines.append(f"{name}: {passed} of {len(tests)} tests passed, {rows} draft rows")
            lines += [f"  {test['name']}: {test['message'][:400]}" for test in tests if test["outcome"] == "failed"]
    for name, make in PAGES.items():
        lines += [f"{name}:", make([cell for part, own in found.items() if part.startswith(name) for cell in own])]
    unfinished = {part.name: state.get(part.name, {"state": "not run"}) for part in parts}
    lines += [f"not done: {name}: {entry}" for name, entry in unfinished.items() if entry["state"] != "done"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=arms.ROOT / "bench-results/gpu-day", help="folder of results")
    parser.add_argument("--slice", type=float, default=math.inf, metavar="SECONDS", help="end after so long")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="parts that have one in their names")
    args = parser.parse_args()
    for key in arms.NOT_INHERITED:
        os.environ.pop(key, None)
    parts = [part for part in all_parts() if any(word in part.name for word in args.only)]
    state = run_parts(parts, args.out, args.slice)
    text = page(parts, args.out, state)
    (args.out / "page.txt").write_text(text)
    print("\n" + text)
    return 0 if all(state.get(part.name, {}).get("state") == "done" for part in parts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
