"""Run every arm in turn and end with the table: ``make demo``, or ``python -m examples.demo --help``."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.demo.arm import MARK, Arm, engine_settings
from examples.demo.table import terminal
from peagle_vllm.provenance import hardware, versions

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",  # one thread is fastest on models this small
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}


def arms(**common: Any) -> list[Arm]:
    return [
        Arm("none", **common),
        *(Arm("EAGLE-3", head="tiny-llama-eagle3", k=k, **common) for k in (3, 5)),
        *(Arm("P-EAGLE", head="tiny-llama-peagle", k=k, parallel=True, **common) for k in (3, 5, 7)),
    ]


def title(arm: Arm) -> str:
    return f"{arm.name} K={arm.k}" if arm.k else arm.name


def run(arm: Arm, progress: Progress) -> dict[str, Any]:
    """Measure ``arm`` in a fresh process while its bar moves."""
    bar = progress.add_task(title(arm), total=None)
    command = [sys.executable, "-m", "examples.demo.arm", json.dumps(asdict(arm))]
    result, end_of_log = None, ""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith(MARK):
                continue
            match json.loads(line.removeprefix(MARK)):
                case {"event": "loaded", "steps": steps}:
                    progress.update(bar, total=steps)
                case {"event": "step"}:
                    progress.advance(bar)
                case {"event": "result", "result": found}:
                    result = found
        process.wait()
        errors.seek(0)
        end_of_log = errors.read()[-4000:]
    if result is None:
        raise SystemExit(f"{title(arm)} failed:\n{end_of_log}")
    return result


def configuration(arm: Arm) -> dict[str, Any]:
    settings = engine_settings(arm)
    settings = {name: value for name, value in settings.items() if name not in ("model", "speculative_config")}
    return {
        "versions": versions(),
        **hardware(),
        "threads": 1,
        "prompts": arm.prompts,
        "max_tokens": arm.max_tokens,
        "repeats": arm.repeats,
        "temperature": 0,
        "dtype": settings["dtype"],
        "engine": settings,
        "environment": ENVIRONMENT,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=Path("models"), help="folder of the tiny models")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs; the median counts")
    parser.add_argument("--out", type=Path, help="also write the result, with its whole configuration, to this file")
    args = parser.parse_args()
    common = {
        "models": str(args.models),
        "prompts": args.prompts,
        "max_tokens": args.max_tokens,
        "repeats": args.repeats,
    }
    console, results = Console(), []
    columns = (TextColumn("{task.description:14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for arm in arms(**common):
            results.append(run(arm, progress))
    plain = results[0]["output_sha256"]
    for result in results:
        result["same_output"] = set(result["output_sha256"].values()) == {plain["1"]}
    report = {"configuration": configuration(arm), "arms": results}
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    console.print(terminal(report))
    drafters = ", ".join(dict.fromkeys(r["drafter"] for r in results if r["arm"]["parallel"]))
    console.print(f"P-EAGLE was drafted by {drafters}.")
    if not all(result["same_output"] for result in results):
        console.print("[bold red]An output differs from the unspeculated one.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
