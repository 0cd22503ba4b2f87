"""The tools behind `make`: the environment's recipe and the groups of the suite."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import env, test
from tools.env import ROOT


def test_torch_is_the_one_that_vllm_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Out of pip's own index, and where that has none, out of PyTorch's."""
    ran: list[str] = []

    def run(*command, check: bool = True) -> subprocess.CompletedProcess:
        ran.append(" ".join(map(str, command)))
        return subprocess.CompletedProcess(command, int(ran[-1].endswith("torch==9.9+cpu")))

    monkeypatch.setattr(env, "run", run)
    monkeypatch.setattr(env, "output", lambda *command: "torch==9.9+cpu" if env.READ_TORCH_PIN in command else "")
    env.install(tmp_path, "0.32.0")
    torch = [line.partition("torch==9.9+cpu")[2] for line in ran if "-m pip install" in line and "torch==" in line]
    assert torch == ["", f" --extra-index-url {env.TORCH_CPU_INDEX}"]
    *_, packages, compiled = ran
    assert "cuda-only.txt" in packages and "constraints-0.32.0.txt" in packages and "compileall" in compiled
    assert [line for line in ran if "train.txt" in line and "--no-deps" in line]


def test_every_test_has_its_group() -> None:
    claimed = {path for group in test.GROUPS.values() for path in group.paths}
    assert set(test.OWN_PROCESS) <= claimed
    for group in test.GROUPS.values():
        assert group.command or group.paths or set(group.without) == set(test.OWN_PROCESS)
        assert all((ROOT / "tests" / path.partition("::")[0]).exists() for path in group.paths + group.without)


def test_make_help_names_every_target() -> None:
    command = ["make", "--no-print-directory", "help"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    makefile = (ROOT / "Makefile").read_text()
    phony = {line.split()[1] for line in makefile.splitlines() if line.startswith(".PHONY:")}
    assert phony - {"next", "next-wheel", "torchvision"} == {line.split()[1] for line in listed.splitlines()}


def test_tests_and_benchmarks_do_not_feed_each_other() -> None:
    """What both need is in tools/ or tests/support. Tests of the benchmarks import them."""
    tests = [file for file in (ROOT / "tests").rglob("*.py") if "benchmarks" not in file.parts[-2:]]
    others = [file for room in ("benchmarks", "models", "tools", "examples") for file in (ROOT / room).rglob("*.py")]
    for files, rooms in ((tests, "benchmarks|models"), (others, r"tests(?!\.support)")):
        imports = re.compile(rf"^\s*(from|import) ({rooms})\b", re.MULTILINE)
        assert [str(file) for file in files if imports.search(file.read_text())] == []


def test_the_plugin_logs_under_vllms_handler() -> None:
    """A logger of another name writes nothing: vLLM gives a handler to its own."""
    text = "".join(file.read_text() for file in (ROOT / "src/peagle_vllm").rglob("*.py"))
    assert set(re.findall(r"(?:init_logger|getLogger)\((.+?)\)", text)) == {'"vllm.peagle"', "logger.name"}


def test_without_the_index_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left. A hash that is not the file's is refused by pip itself."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    for name, value in {"PIP_RETRIES": "0", "PIP_TIMEOUT": "1", "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "tools.real_target", str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("pip's index does not give the wheels of real.txt (ERROR: No matching")
    assert list((tmp_path / "cache").iterdir()) == []
