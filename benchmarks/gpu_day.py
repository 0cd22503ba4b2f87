"""A rung of measurements on a GPU, most valuable part first: ``python -m benchmarks.gpu_day RUNG --seconds N``.

A rung is groups of parts, each a process with a limit; those of a group run side by side. Every finished test and cell
is written at once and kept, even if its process or this one is killed. The command ends within N seconds; called again,
it continues with the parts that are not done. In the end one folder holds a page of text, the results in one file, and
an archive of all results and logs. Without a GPU the same parts are rehearsed at tiny shapes. The exit status is 0 once
every part is done.
"""

import argparse
import math
import os
import shutil
import sys
import tarfile
from pathlib import Path

from benchmarks import arms, rung1, rung2, rung3, rung4, train_gpu
from benchmarks.page import page, result
from benchmarks.parts import run_parts, states
from peagle_tools.shared.atomic_files import write_whole

RUNGS = {1: rung1, 2: rung2, 3: rung3, 4: rung4}
KIND = "rung" if arms.HAS_GPU else "rehearsal"  # apart: some parts have the same name in both
RESERVE = 40  # of the seconds: to end what still runs (15 at most), and for page and archive


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rung", type=int, choices=RUNGS, help="; ".join(f"{n}: {m.__doc__}" for n, m in RUNGS.items()))
    parser.add_argument("parts", nargs="*", metavar="PART", help="only the parts of these names")
    parser.add_argument("--seconds", type=float, default=math.inf, metavar="N", help="end within so long")
    parser.add_argument("--out", type=Path, help=f"folder of results (default: bench-results/{KIND}-RUNG)")
    args = parser.parse_intermixed_args()
    for key in arms.NOT_INHERITED:
        os.environ.pop(key, None)
    rung, folder = RUNGS[args.rung], args.out or arms.ROOT / f"bench-results/{KIND}-{args.rung}"
    groups = rung.parts()
    every = [part for group in groups for part in group]
    if unknown := [name for name in args.parts if name not in (part.name for part in every)]:
        known = ", ".join(part.name for part in every)
        raise SystemExit(f"no such part: {', '.join(unknown)}; there are: {known}")
    chosen = args.parts or [part.name for part in every]
    run_parts([[part for part in group if part.name in chosen] for group in groups], folder, args.seconds - RESERVE)
    if rung is rung3:
        train_gpu.bring_back(folder)
    text = page(rung, every, folder)
    write_whole(folder / f"page-{args.rung}.txt", text)
    write_whole(folder / f"rung-{args.rung}.json", result(rung, every, folder))
    with tarfile.open(folder / f"rung-{args.rung}.tar.gz", "w:gz") as archive:
        for file in sorted(folder.iterdir()):
            if file.is_file() and not file.name.endswith(".tar.gz"):
                archive.add(file, f"rung-{args.rung}/{file.name}")
    if "OUT" in os.environ:  # what comes back from a GPU host
        for name in (f"page-{args.rung}.txt", f"rung-{args.rung}.tar.gz"):
            shutil.copy(folder / name, os.environ["OUT"])
    print(f"\n{text}\nin {folder}: page-{args.rung}.txt, rung-{args.rung}.tar.gz")
    return 0 if all(states(folder).get(name, {}).get("state") == "done" for name in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
