"""Break the product on purpose, one line at a time: each break must fail the test it names.

    python -m tests.mutants.run [WORDS OF A NAME ...]

Works on copies of the product in a temporary folder. Exits 1 if a mutant survives, if a test fails without any
mutant, or if a mutation no longer fits the source.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.mutation import Mutation
from tests.mutants.mutations import MUTATIONS
from tests.mutants.trials import ROOT, Trial, environment


def stale(mutation: Mutation) -> bool:
    return (ROOT / mutation.file).read_text().count(mutation.old) != 1


def planned(chosen: list[Mutation]) -> dict[str, list[Trial]]:
    """By arm: every killer once without a mutant, then every mutant."""
    plan: dict[str, list[Trial]] = {}
    for arm in dict.fromkeys(m.arm for m in chosen):
        mine = [m for m in chosen if m.arm == arm]
        plan[arm] = [Trial(node) for node in dict.fromkeys(m.killer for m in mine)]
        plan[arm] += [Trial(m.killer, m.name, m.file, m.old, m.new) for m in mine]
    return plan


def run_arm(arm: str, trials: list[Trial], folder: Path) -> list[str]:
    """Run the trials of one arm in one process of its own; returns the lines of what went wrong."""
    command = [sys.executable, "-m", "tests.mutants.trials", arm, str(folder)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(arm), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    bad, left = [], list(trials)
    process.stdin.write("\n".join(trial.to_json() for trial in trials) + "\n")
    process.stdin.close()
    for line in process.stdout:
        if not line.startswith("trial\t"):
            continue
        _, index, status, seconds = line.split("\t")
        trial = trials[int(index)]
        left.remove(trial)
        verdict = trial.verdict(int(status))
        print(
            f"{verdict:9} {float(seconds):4.0f} s  {arm:9}  {trial.name:48} {trial.node.rpartition('/')[2]}", flush=True
        )
        if verdict not in ("killed", "passed"):
            log = (folder / f"{arm}-{index}.log").read_text()
            bad.append(f"===== {trial.name}: {verdict} =====\n{log[-3000:]}")
    process.wait()
    return bad + [f"===== {trial.name}: never ran =====" for trial in left]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="run the mutations whose name holds one of these")
    args = parser.parse_args()
    chosen = [m for m in MUTATIONS if not args.words or any(word in m.name for word in args.words)]
    if unfit := [m.name for m in chosen if stale(m)]:
        print(f"these mutations no longer fit the source, adapt tests/mutants/mutations.py: {', '.join(unfit)}")
        return 1
    began, plan = time.monotonic(), planned(chosen)
    with tempfile.TemporaryDirectory(prefix="peagle-mutants-") as name, ThreadPoolExecutor(2) as pool:
        bad = [line for lines in pool.map(lambda arm: run_arm(arm, plan[arm], Path(name)), plan) for line in lines]
    print("\n".join(bad))
    print(f"{len(chosen)} mutants, {len(bad)} problems, {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
