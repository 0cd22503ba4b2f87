"""Break the product on purpose, one line at a time: each break must fail the test it names.

    python -m tests.mutants.run [WORDS OF A NAME ...]

Exits 1 if a mutant survives, if a test fails without any mutant, or if a mutation no longer fits the source.

Breaks are text replacements, each with the test that must notice it: ``mutants.txt`` has them. Greedy output notices
none: the target corrects every wrong draft. That is why drafts are tested.

The file reads like a diff. Below the path of a product file its mutants, with a blank line between them:

    what is broken
    - the text, without its indentation; it is there exactly once in the file
    + what replaces it; nothing deletes it
    ! the test that must fail on plugin-v2        left out: DECODING, on the arm that the places tell

First, for each arm, a process runs the tests that its mutants name; then each mutant has a process of its own, which
takes our packages from a copy of the tree.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 300  # seconds; a mutant may hang the engine
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-W", "ignore")
DECODING = "tests/drafts/test_basics.py::test_decoding"
# What tests of a folder need, and whoever runs a broken file of one.
ARMS = {"tests/kernels/": "kernels", "tests/v2/": "plugin-v2", "src/peagle_vllm/v2/": "plugin-v2"}


@dataclass(frozen=True)
class Mutation:
    """One break."""

    name: str
    file: str
    old: str  # exactly once in ``file``
    new: str
    killer: str  # pytest node id of the test that must fail
    named_arm: str  # PEAGLE_TEST_ARM for it, where its place does not tell

    @property
    def arm(self) -> str:
        """plugin-v1 runs the torch twins, plugin-v2 the kernels; "kernels" runs those without vLLM."""
        needed = (arm for place, arm in ARMS.items() if self.killer.startswith(place) or self.file.startswith(place))
        return self.named_arm or next(needed, "plugin-v1")

    def fits(self) -> bool:
        return (ROOT / self.file).read_text().count(self.old) == 1


def read(text: str) -> Iterator[Mutation]:
    for section in text.split("=== ")[1:]:
        file, _, mutants = section.partition("\n")
        for mutant in mutants.strip().split("\n\n"):
            name, *lines = mutant.split("\n")
            assert name and all(line[0] in "-+!" for line in lines), f"{file}: {mutant}"
            old, new, killer = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+!")
            killer, _, arm = (killer or DECODING).partition(" on ")
            yield Mutation(name, file, old, new, killer, arm)


MUTATIONS = tuple(read(Path(__file__).with_name("mutants.txt").read_text()))


def run_unbroken(arm: str, killers: Iterable[str]) -> str:
    """What is wrong with the tests of an arm where nothing is broken."""
    status, log = run_tests(arm, killers, ROOT, TIMEOUT * 10)
    print(f"{'passed' if status == 0 else 'FAILED':9}  {arm:9}  (no mutant)", flush=True)
    return f"===== {arm}, no mutant =====\n{log[-3000:]}" if status else ""


def run_mutant(mutation: Mutation) -> str:
    """What is wrong with a mutant: it survives, or its test does not run."""
    began = time.monotonic()
    with TemporaryDirectory(prefix="peagle-mutant-") as folder:
        for entry in ("kernels", "src"):
            shutil.copytree(ROOT / entry, Path(folder, entry), ignore=shutil.ignore_patterns("__pycache__"))
        broken = Path(folder, mutation.file)
        broken.write_text(broken.read_text().replace(mutation.old, mutation.new))
        status, log = run_tests(mutation.arm, [mutation.killer], Path(folder), TIMEOUT)
    verdict = {0: "survived", 1: "killed"}.get(status, f"exit {status}")
    where = mutation.killer.rpartition("/")[2]
    print(f"{verdict:9} {time.monotonic() - began:4.0f} s  {mutation.arm:9}  {mutation.name:48} {where}", flush=True)
    return "" if status == 1 else f"===== {mutation.name}: {verdict} =====\n{log[-3000:]}"


def run_tests(arm: str, tests: Iterable[str], product: Path, seconds: float) -> tuple[int, str]:
    """Pytest's output on the packages of a tree, and its status; 1 also if a signal ended it, or it hangs."""
    env = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PEAGLE_TEST_ARM")}
    env |= {"TRITON_INTERPRET": "1"} if arm == "kernels" else {"PEAGLE_TEST_ARM": arm}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{product}/kernels{os.pathsep}{product}/src"}
    try:
        done = subprocess.run(
            [*PYTEST, *tests], cwd=ROOT, env=env, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, "takes too long"
    return 1 if done.returncode < 0 else done.returncode, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="run the mutations whose name holds one of these")
    args = parser.parse_args()
    chosen = [m for m in MUTATIONS if not args.words or any(word in m.name for word in args.words)]
    if unfit := [m.name for m in chosen if not m.fits()]:
        print(f"these mutations no longer fit the source, adapt them in tests/mutants: {', '.join(unfit)}")
        return 1
    began, killers = time.monotonic(), dict[str, dict[str, None]]()
    for mutation in chosen:
        killers.setdefault(mutation.arm, {})[mutation.killer] = None
    with ThreadPoolExecutor(2) as pool:
        outcomes = [*pool.map(run_unbroken, killers, killers.values()), *pool.map(run_mutant, chosen)]
    bad = [outcome for outcome in outcomes if outcome]
    print("\n".join(bad))
    print(f"{len(chosen)} mutants, {len(bad)} problems, {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
