"""Break the product on purpose, one line at a time: each break must fail the test it names.

    python -m tests.mutants.run [WORDS OF A NAME ...] [--jobs 2]

Works on copies of the tree in a temporary folder; exits 1 if a mutant survives, if a test fails without any
mutant, or if a mutation no longer fits the source.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("kernels", "src", "tests", "pyproject.toml")
TIMEOUT = 240  # seconds; a mutant may hang the engine


@dataclass(frozen=True)
class Outcome:
    """How one pytest run on one copy of the tree ended."""

    verdict: str  # "killed", "survived", "passed" or what went wrong
    seconds: float
    output: str


def stale(mutation: Mutation) -> bool:
    return (ROOT / mutation.file).read_text().count(mutation.old) != 1


def run_test(folder: Path, node: str, arm: str) -> tuple[int, str]:
    """Exit status and output of one pytest node on the tree in ``folder``."""
    env = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "PEAGLE_TEST_ARM")}
    env |= {"TRITON_INTERPRET": "1"} if arm == "kernels" else {"PEAGLE_TEST_ARM": arm}
    env |= {"PYTHONPATH": f"{folder}/kernels:{folder}/src", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-W", "ignore", node]
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return 1, f"no end after {TIMEOUT} s"
    return done.returncode, done.stdout


def trial(node: str, arm: str, mutation: Mutation | None = None) -> Outcome:
    """Run ``node`` on a fresh copy of the tree, broken by ``mutation`` if there is one."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="peagle-mutant-") as name:
        folder = Path(name)
        for entry in COPIED:
            source = ROOT / entry
            if source.is_dir():
                shutil.copytree(source, folder / entry, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / entry)
        if mutation is not None:
            file = folder / mutation.file
            file.write_text(file.read_text().replace(mutation.old, mutation.new))
        status, output = run_test(folder, node, arm)
    names = {0: "passed" if mutation is None else "survived", 1: "killed" if mutation else "failed"}
    return Outcome(names.get(status, f"pytest exit {status}"), time.monotonic() - began, output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="run the mutations whose name holds one of these")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    args = parser.parse_args()
    chosen = [m for m in MUTATIONS if not args.words or any(word in m.name for word in args.words)]
    if unfit := [m.name for m in chosen if stale(m)]:
        print(f"these mutations no longer fit the source, adapt tests/mutants/mutations.py: {', '.join(unfit)}")
        return 1
    began, bad = time.monotonic(), []
    controls = sorted({(m.killer, m.arm) for m in chosen})
    with ThreadPoolExecutor(args.jobs) as pool:
        print("without a mutant:")
        for (node, arm), outcome in zip(controls, pool.map(lambda c: trial(*c), controls), strict=True):
            print(f"  {outcome.verdict:9} {outcome.seconds:4.0f} s  {arm:9}  {node}", flush=True)
            if outcome.verdict != "passed":
                bad.append((node, outcome))
        print("mutants:")
        for mutation, outcome in zip(chosen, pool.map(lambda m: trial(m.killer, m.arm, m), chosen), strict=True):
            node = mutation.killer.rpartition("/")[2]
            print(
                f"  {outcome.verdict:9} {outcome.seconds:4.0f} s  {mutation.arm:9}  {mutation.name:45} {node}",
                flush=True,
            )
            if outcome.verdict != "killed":
                bad.append((mutation.name, outcome))
    for name, outcome in bad:
        print(f"\n===== {name}: {outcome.verdict} =====\n{outcome.output[-3000:]}")
    print(f"\n{len(chosen)} mutants, {len(bad)} problems, {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
