"""The whole suite, in the processes it needs, two at a time: ``python tools/test.py [--full] [GROUP ...]``.

The groups differ in what must be true before vLLM or Triton is imported (tests/conftest.py says why). A test is
in exactly one group, and a new test folder runs in ``plain`` until it is given a place here.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Group:
    """One process: pytest, or a command that passes if it exits 0."""

    paths: tuple[str, ...] = ()  # below tests/, as ``without``
    without: tuple[str, ...] = ()
    marks: str = ""  # a mark expression of pytest
    env: dict[str, str] = field(default_factory=dict)
    python: str = sys.executable
    command: tuple[str, ...] = ()

    def argv(self, full: bool) -> list[str]:
        if self.command:
            return [self.python, *self.command]
        marks = " and ".join(filter(None, (self.marks, "" if full else "not full")))
        return [
            *(self.python, "-m", "pytest", "-q", "--durations=5", "--durations-min=2", "-p", "no:cacheprovider"),
            *("-m", marks),
            *(f"tests/{path}" for path in self.paths or ("",)),
            *(f"--ignore=tests/{path}" for path in self.without),
        ]


def arm(name: str, *paths: str, without: tuple[str, ...] = (), python: str = sys.executable, **env: str) -> Group:
    """The tests that are marked for an arm."""
    return Group(paths, without, "arm", {"PEAGLE_TEST_ARM": name, **env}, python)


REAL_SWEEP = "bench/test_real.py"
OWN_PROCESS = ("benchmarks", "kernels", "server", "packaging", "examples", REAL_SWEEP)
COMPILED = ("kernels/test_aot.py",)  # the interpreter does not compile
# For targets that read images (drafts/test_targets.py).
TORCHVISION = os.pathsep.join(filter(None, (f"{ROOT}/.cache/torchvision", os.environ.get("PYTHONPATH"))))

# On vLLM's next release (tools/next.py), what depends on vLLM and needs an engine or its source: `make test-next`. Of
# it, `make test` runs a slice on each runner.
NEXT = f"{ROOT}/.cache/next/bin/python"
ENGINES = ("drafts", "v2", "sampling", "features", "patches")
BASICS = "decoding", "drafts_looked_up", "next_to_max_model_len"
SLICE = tuple(f"drafts/test_basics.py::test_{name}" for name in BASICS)
GROUPS = {
    "next v2": arm("plugin-v2", *ENGINES, python=NEXT),
    "next v1": arm("plugin-v1", *ENGINES, python=NEXT),
    "next server": Group(("server",), python=NEXT),
    "next plain": Group(ENGINES, marks="not arm", python=NEXT),
    # The long ones first: they decide when the last one ends.
    "plain": Group(without=OWN_PROCESS, marks="not arm"),
    "v2": arm("plugin-v2", without=OWN_PROCESS, PYTHONPATH=TORCHVISION),
    "v1": arm("plugin-v1", without=OWN_PROCESS, PYTHONPATH=TORCHVISION),
    "kernels": Group(("kernels",), without=COMPILED, env={"TRITON_INTERPRET": "1"}),
    "benchmarks": Group(("benchmarks",)),
    "types": Group(command=("-m", "mypy")),
    "bench": Group((REAL_SWEEP,)),
    "compile": Group(COMPILED),
    "server": Group(("server",)),
    "examples": Group(("examples",)),
    "stock": arm("stock-v1", without=OWN_PROCESS),
    "packaging": Group(("packaging",)),
    "slice v2": arm("plugin-v2", *SLICE, python=NEXT),
    "slice v1": arm("plugin-v1", *SLICE, "patches/test_refusals.py", python=NEXT),
    "lint": Group(command=("-m", "ruff", "check", ".")),
    "format": Group(command=("-m", "ruff", "format", "--check", ".")),
    "imports": Group(
        command=("-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-logo", "--no-cache")
    ),
}


def run(name: str, full: bool) -> tuple[bool, str]:
    """One group in a process of its own, whose output is printed once it has ended.

    Returns:
        Whether it passed (a group whose tests were all skipped did not), and a line about it.
    """
    print(f"start {name}\n", end="", flush=True)  # in one piece: two threads print
    group, began = GROUPS[name], time.monotonic()
    env = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "PEAGLE_TEST_ARM")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **group.env}
    done = subprocess.run(
        group.argv(full), cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    lines = done.stdout.rstrip().splitlines()
    counts = next((line for line in reversed(lines) if re.search(r"\d+ (passed|failed|error|skipped)", line)), "")
    passed = done.returncode == 0 and (bool(group.command) or " passed" in counts)
    verdict = f"{'ok' if passed else 'FAILED'} in {time.monotonic() - began:.0f} s"
    print("\n".join([f"\n===== {name}: {verdict} =====", *lines, ""]), end="", flush=True)
    return passed, f"{name:14} {verdict:16} {'' if group.command else counts}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of: {', '.join(GROUPS)} (default: all)")
    parser.add_argument("--full", action="store_true", help="with the large grids")
    parser.add_argument("--next", action="store_true", help="the groups of vLLM's next release, by default all of them")
    args = parser.parse_args()
    if unknown := set(args.groups) - set(GROUPS):
        parser.error(f"no such group: {', '.join(sorted(unknown))}")
    began, groups = time.monotonic(), [name for name in GROUPS if name.startswith("next ") == args.next]
    with ThreadPoolExecutor(2) as pool:
        outcomes = [*pool.map(lambda name: run(name, args.full), args.groups or groups)]
    print(f"\n===== all groups in {time.monotonic() - began:.0f} s =====")
    print(*(line for _, line in outcomes), sep="\n")
    return 0 if all(passed for passed, _ in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
