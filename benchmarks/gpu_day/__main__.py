"""A GPU's first half hour, most valuable part first: ``python -m benchmarks.gpu_day [--slice SECONDS]``.

Call it again and again, on a host that cuts commands off after some time with ``--slice`` a minute less than that; it
goes on where it was. In --out lie gpu-day.json (every part's state and result), gpu-day.txt (the page of ratios) and
gpu-day.log. The exit status is 0 once every part is done.
"""

import argparse
import json
import math
import os
from pathlib import Path

from benchmarks import arms
from benchmarks.gpu_day.page import page
from benchmarks.gpu_day.parts import all_parts
from benchmarks.gpu_day.running import read, run_parts

PAGE = "gpu-day.txt"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=arms.ROOT / "bench-results/gpu-day", help="folder of results")
    parser.add_argument("--slice", type=float, default=math.inf, metavar="SECONDS", help="end after so long")
    parser.add_argument("--retry", action="store_true", help="run failed parts again")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="parts that have one in their names")
    parser.add_argument("--llm", type=json.loads, default={}, help="more arguments for LLM in timed engines, as JSON")
    parser.add_argument("--report", action="store_true", help="run nothing, print the page")
    args = parser.parse_args()
    every = all_parts(args.llm)
    parts = [part for part in every if any(word in part.name for word in args.only)]
    if not parts:
        parser.error(f"--only: no part's name holds {' or '.join(args.only)}: {'; '.join(part.name for part in every)}")
    if args.slice < (least := 1 + max(part.limit for part in parts) / 2):
        parser.error(f"--slice {args.slice:g}: too short, some part would never begin; {least:g} at least")
    if args.report:
        print(page(every, read(args.out)))
        return 0
    for key in arms.NOT_INHERITED:
        os.environ.pop(key, None)

    def write_page(known: dict) -> None:
        (args.out / PAGE).write_text(page(every, known))

    known = run_parts(parts, args.out, args.slice, args.retry, write_page)
    print("\n" + page(every, known))
    return 0 if all(known.get(part.name, {}).get("state") == "done" for part in parts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
