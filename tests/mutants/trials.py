"""One process for the trials of one arm: it imports vLLM once, and forks for each trial.

Importing vLLM takes ten times as long as a small draft test. A fork starts with vLLM imported and without
our packages, which it takes from a copy of the tree, broken or not.
"""

import json
import os
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 300  # seconds; a mutant may hang the engine


@dataclass(frozen=True)
class Trial:
    """A pytest node, on the tree as it is or with one text replaced."""

    node: str
    name: str = "(no mutant)"
    file: str = ""
    old: str = ""
    new: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def verdict(self, status: int) -> str:
        """Pytest's exit status 1 is failing tests; any other failure kills nothing."""
        words = {0: "survived", 1: "killed"} if self.file else {0: "passed", 1: "failed"}
        return words.get(status, f"exit {status}")


def environment(arm: str) -> dict[str, str]:
    """The arm's process environment; "kernels" and "compile" are the kernel tests', which import no vLLM."""
    env = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "PEAGLE_TEST_ARM")}
    env |= {"kernels": {"TRITON_INTERPRET": "1"}, "compile": {}}.get(arm, {"PEAGLE_TEST_ARM": arm})
    return env | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def import_early(arm: str) -> None:
    """What every trial of this arm would import anyway, our own packages excepted."""
    without_vllm = arm in ("kernels", "compile")
    if not without_vllm:
        from tests import conftest  # noqa: F401  (the environment that Triton and vLLM read when they are imported)
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import triton  # noqa: F401

    torch.set_num_threads(1)
    if without_vllm:
        return
    if arm == "plugin-v2":
        from tests.support.interpreter import enable

        enable()
    import vllm.entrypoints.llm
    import vllm.v1.worker.cpu_worker  # noqa: F401

    ours = [name for name in sys.modules if name.split(".")[0] in ("peagle_vllm", "peagle_kernels")]
    assert not ours, f"imported too early to be broken: {ours}"


def run_forked(trial: Trial, tree: Path, log: Path) -> int:
    """Pytest's exit status of ``trial`` on a copy of the product in ``tree``."""
    for entry in ("kernels", "src"):
        shutil.copytree(ROOT / entry, tree / entry, ignore=shutil.ignore_patterns("__pycache__"))
    if trial.file:
        broken = tree / trial.file
        broken.write_text(broken.read_text().replace(trial.old, trial.new))
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            os.setsid()
            signal.alarm(TIMEOUT)
            out = os.open(log, os.O_WRONLY | os.O_CREAT)
            os.dup2(out, 1)
            os.dup2(out, 2)
            sys.path[:0] = [str(tree / "kernels"), str(tree / "src")]
            import pytest

            options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-W", "ignore"]
            status = int(pytest.main([*options, trial.node]))
            sys.stdout.flush()
        finally:
            os._exit(status)
    _, ended = os.waitpid(pid, 0)
    shutil.rmtree(tree)
    return 1 if os.WIFSIGNALED(ended) else os.WEXITSTATUS(ended)


def main() -> None:
    arm, folder = sys.argv[1], Path(sys.argv[2])
    trials = [Trial(**json.loads(line)) for line in sys.stdin if line.strip()]
    import_early(arm)
    for index, trial in enumerate(trials):
        began = time.monotonic()
        status = run_forked(trial, folder / f"{arm}-{index}", folder / f"{arm}-{index}.log")
        print(f"trial\t{index}\t{status}\t{time.monotonic() - began:.1f}", flush=True)


if __name__ == "__main__":
    main()
