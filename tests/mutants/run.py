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

Each arm has a process of its own, which forks for each trial: importing vLLM takes ten times as long as a small draft
test. A fork starts with vLLM imported and without our packages, which it takes from a copy of the tree, broken or not.
"""

import argparse
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 300  # seconds; a mutant may hang the engine
PYTEST = ("-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-W", "ignore")
DECODING = "tests/drafts/test_basics.py::test_decoding"
# What tests of a folder need, and whoever runs a broken file of one.
ARMS = {"tests/kernels/": "kernels", "tests/v2/": "plugin-v2", "src/peagle_vllm/v2/": "plugin-v2"}


@dataclass(frozen=True)
class Mutation:
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


def planned(chosen: list[Mutation]) -> dict[str, list[Mutation]]:
    """By arm: every killer once without a mutant, a text replaced by itself, then every mutant."""
    plan: dict[str, list[Mutation]] = {}
    for mutation in chosen:
        plan.setdefault(mutation.arm, []).append(mutation)
    for trials in plan.values():
        unbroken = {trial.killer: replace(trial, name="(no mutant)", new=trial.old) for trial in trials}
        trials[:0] = unbroken.values()
    return plan


def run_arm(arm: str, trials: list[Mutation]) -> list[str]:
    """Run the trials of one arm in this process, which does nothing else; returns what went wrong."""
    import_early(arm)
    bad = []
    for trial in trials:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="peagle-mutant-") as folder:
            status = run_forked(trial, Path(folder))
            log = Path(folder, "log").read_text()
        words = ("passed", "failed") if trial.new == trial.old else ("survived", "killed")
        verdict = words[status] if status in (0, 1) else f"exit {status}"  # pytest's 1 is failing tests
        seconds = time.monotonic() - began
        print(f"{verdict:9} {seconds:4.0f} s  {arm:9}  {trial.name:48} {trial.killer.rpartition('/')[2]}", flush=True)
        if verdict not in ("killed", "passed"):
            bad.append(f"===== {trial.name}: {verdict} =====\n{log[-3000:]}")
    return bad


def import_early(arm: str) -> None:
    """The arm's environment, and what every trial would import anyway, our own packages excepted."""
    for name in ("TRITON_INTERPRET", "PEAGLE_TEST_ARM"):
        os.environ.pop(name, None)
    os.environ |= {"TRITON_INTERPRET": "1"} if arm == "kernels" else {"PEAGLE_TEST_ARM": arm}
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    if arm != "kernels":
        from tests import conftest  # noqa: F401  (the environment that Triton and vLLM read when they are imported)
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import triton  # noqa: F401

    torch.set_num_threads(1)
    if arm == "kernels":
        return
    if arm == "plugin-v2":
        from tools.interpreter import enable

        enable()
    import vllm.entrypoints.llm
    import vllm.v1.worker.cpu_worker  # noqa: F401

    ours = [name for name in sys.modules if name.split(".")[0] in ("peagle_vllm", "peagle_kernels")]
    assert not ours, f"imported too early to be broken: {ours}"


def run_forked(trial: Mutation, folder: Path) -> int:
    """Pytest's exit status on a copy of the product in ``folder``, where its output is ``log``."""
    for entry in ("kernels", "src"):
        shutil.copytree(ROOT / entry, folder / entry, ignore=shutil.ignore_patterns("__pycache__"))
    broken = folder / trial.file
    broken.write_text(broken.read_text().replace(trial.old, trial.new))
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            os.setsid()
            signal.alarm(TIMEOUT)
            out = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
            os.dup2(out, 1)
            os.dup2(out, 2)
            sys.path[:0] = [str(folder / "kernels"), str(folder / "src")]
            import pytest

            status = int(pytest.main([*PYTEST, trial.killer]))
            sys.stdout.flush()
        finally:
            os._exit(status)
    _, ended = os.waitpid(pid, 0)
    return 1 if os.WIFSIGNALED(ended) else os.WEXITSTATUS(ended)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="run the mutations whose name holds one of these")
    args = parser.parse_args()
    chosen = [m for m in MUTATIONS if not args.words or any(word in m.name for word in args.words)]
    if unfit := [m.name for m in chosen if not m.fits()]:
        print(f"these mutations no longer fit the source, adapt them in tests/mutants: {', '.join(unfit)}")
        return 1
    began, plan = time.monotonic(), planned(chosen)
    spawn = multiprocessing.get_context("spawn")  # a new process for each arm, which has imported nothing yet
    with tempfile.TemporaryDirectory(prefix="peagle-mutants-") as folder:
        os.environ |= {"TMPDIR": folder, "PYTHONWARNINGS": "ignore"}  # else one of semaphores that engines leave
        with ProcessPoolExecutor(2, spawn, max_tasks_per_child=1) as pool:
            bad = [line for lines in pool.map(run_arm, plan, plan.values()) for line in lines]
    print("\n".join(bad))
    print(f"{len(chosen)} mutants, {len(bad)} problems, {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
