"""Run every arm in turn and end with the table: ``make demo``, or ``python -m examples.demo --help``."""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track

from benchmarks.arms import ON_CPU, ArmError, run, write_result
from benchmarks.heldout import measure
from examples.demo.table import markdown
from peagle_tools.shared.provenance import hardware, versions

BATCHES = [1, 8]
ARMS = [
    ("none", None, 0),
    *(("EAGLE-3", "tiny-llama-eagle3", k) for k in (3, 5)),
    *(("P-EAGLE", "tiny-llama-peagle", k) for k in (3, 5, 7)),
    *(("P-EAGLE, sharpened", "tiny-llama-peagle-sharp", k) for k in (5, 7)),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs; the median counts")
    parser.add_argument("--out", type=Path, help="also write the result, with its whole configuration, to this file")
    args = parser.parse_args()
    common = {name: value for name, value in vars(args).items() if name != "out"} | {"models": "models"}
    console, results = Console(), []
    for name, head, k in track(ARMS, "arms", console=console):
        try:
            found = run(measure, ON_CPU, target="tiny-llama", head=head, k=k, batches=BATCHES, **common)
        except ArmError as error:
            raise SystemExit(f"{name} K={k} failed: {error}") from None
        arm = {"name": name, "head": head, "k": k, "parallel": name.startswith("P-EAGLE"), **common}
        results.append({"arm": arm, **found})
        console.print(f"{name}{f' K={k}' if k else ''}: {found['tokens_per_second']['1']:.0f} tokens/s")
    for result in results:
        result["same_output"] = set(result["output_sha256"].values()) == {results[0]["output_sha256"]["1"]}
    configuration = {"dtype": "float32", "threads": 1, "versions": versions(), **hardware(), **common}
    report = {"configuration": configuration, "arms": results}
    write_result(args.out, __doc__, report)
    console.print(Markdown(markdown(report)))
    drafters = ", ".join(dict.fromkeys(r["drafter"] for r in results if r["arm"]["parallel"]))
    console.print(f"P-EAGLE was drafted by {drafters}.")
    if not all(result["same_output"] for result in results):
        console.print("[bold red]An output differs from the unspeculated one.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
