"""Run every arm in turn and end with the table: ``make demo``, or ``python -m examples.demo --help``."""

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.arms import ENVIRONMENT, ON_CPU, ArmError, run
from benchmarks.heldout import engine_settings, measure, num_steps
from examples.demo.table import terminal
from peagle_vllm.provenance import hardware, versions

BATCHES = [1, 8]
ARMS = [
    ("none", None, 0),
    *(("EAGLE-3", "tiny-llama-eagle3", k) for k in (3, 5)),
    *(("P-EAGLE", "tiny-llama-peagle", k) for k in (3, 5, 7)),
    *(("P-EAGLE, sharpened", "tiny-llama-peagle-sharp", k) for k in (5, 7)),
]


def run_arm(title: str, progress: Progress, **arguments: Any) -> dict[str, Any]:
    """Measure an arm in a fresh process while its bar moves."""
    steps = num_steps(arguments["batches"], arguments["prompts"], arguments["repeats"])
    bar = progress.add_task(title, total=steps)
    with ThreadPoolExecutor(1) as pool, tempfile.NamedTemporaryFile() as grown:
        future = pool.submit(run, measure, ON_CPU, progress=grown.name, **arguments)
        while wait([future], timeout=0.2).not_done:
            progress.update(bar, completed=Path(grown.name).stat().st_size)
    try:
        result = future.result()
    except ArmError as error:
        raise SystemExit(f"{title} failed: {error}") from None
    progress.update(bar, completed=steps)
    return result


def configuration(common: dict[str, Any]) -> dict[str, Any]:
    settings = engine_settings("tiny-llama", None, 0, common["models"], BATCHES)
    engine = {name: value for name, value in settings.items() if name not in ("model", "speculative_config")}
    counts = {name: common[name] for name in ("prompts", "max_tokens", "repeats")}
    environment = {"environment": ENVIRONMENT | ON_CPU}
    fixed = {"threads": 1, "temperature": 0, "dtype": engine["dtype"], "engine": engine}
    return {"versions": versions(), **hardware(), **counts, **fixed, **environment}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="models", help="folder of the tiny models")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs; the median counts")
    parser.add_argument("--out", type=Path, help="also write the result, with its whole configuration, to this file")
    args = parser.parse_args()
    common = {name: value for name, value in vars(args).items() if name != "out"}
    console, results = Console(), []
    columns = (TextColumn("{task.description:22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for name, head, k in ARMS:
            title = f"{name} K={k}" if k else name
            found = run_arm(title, progress, target="tiny-llama", head=head, k=k, batches=BATCHES, **common)
            arm = {"name": name, "head": head, "k": k, "parallel": name.startswith("P-EAGLE"), **common}
            results.append({"arm": arm, **found})
    for result in results:
        result["same_output"] = set(result["output_sha256"].values()) == {results[0]["output_sha256"]["1"]}
    report = {"configuration": configuration(common), "arms": results}
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
