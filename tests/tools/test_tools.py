"""The tools behind `make`: the environment's recipe and the groups of the suite."""

import importlib.metadata
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools import env, next, test

ROOT = Path(__file__).resolve().parents[2]


class Shell:
    """In place of the commands that ``tools/env.py`` runs; those that contain ``fails`` and no ``unless`` fail."""

    def __init__(self, fails: str = "", unless: str = ""):
        self.fails, self.unless, self.commands = fails, unless, []

    def run(self, *command, check: bool = True) -> subprocess.CompletedProcess:
        line = " ".join(map(str, command))
        self.commands.append(line)
        broken = bool(self.fails) and self.fails in line and self.unless not in line
        if broken and check:
            raise subprocess.CalledProcessError(1, line)
        return subprocess.CompletedProcess(line, int(broken))

    def output(self, *command) -> str:
        return "torch==9.9+cpu" if env.READ_TORCH_PIN in command else ""


def commands(monkeypatch: pytest.MonkeyPatch, folder: Path, shell: Shell, vllm_cpu: str = "0.32.0") -> list[str]:
    monkeypatch.setattr(env, "run", shell.run)
    monkeypatch.setattr(env, "output", shell.output)
    env.install(folder, vllm_cpu)
    return shell.commands


def test_torch_is_the_one_that_vllm_names(monkeypatch, tmp_path) -> None:
    ran = commands(monkeypatch, tmp_path, Shell())
    torch = [line for line in ran if "-m pip install" in line and "torch==9.9+cpu" in line]
    assert len(torch) == 1
    assert env.TORCH_CPU_INDEX not in torch[0]
    assert "cuda-only.txt" in ran[-1]
    assert "constraints-0.32.0.txt" in ran[-1]
    assert [line for line in ran if "train.txt" in line and "--no-deps" in line]


def test_torch_comes_from_its_own_index_where_pip_has_none(monkeypatch, tmp_path) -> None:
    shell = Shell(fails="pip install -qq --no-warn-conflicts torch", unless=env.TORCH_CPU_INDEX)
    ran = commands(monkeypatch, tmp_path, shell)
    assert any(line.endswith(f"torch==9.9+cpu --extra-index-url {env.TORCH_CPU_INDEX}") for line in ran)


def test_the_next_release_over_the_library_that_is_here(monkeypatch, tmp_path) -> None:
    """Its Python comes first, each compiled library is this environment's, and the version names both."""
    overlay, wheel, pip, run = tmp_path / "next", tmp_path / "vllm-9.9.9-py3-none-any.whl", [], subprocess.run
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("vllm/__init__.py", "")
        packed.writestr("vllm/_C_cuda.so", "")
        packed.writestr("vllm/_version.py", "__version__ = version = '9.9.9'\n")
        packed.writestr("vllm-9.9.9.dist-info/METADATA", "Metadata-Version: 2.4\nName: vllm\nVersion: 9.9.9\n")

    def without_pip(command: tuple[str, ...], **options: bool) -> None:
        pip.append(command) if "pip" in command else run(command, **options)

    monkeypatch.setattr(next.subprocess, "run", without_pip)
    monkeypatch.setattr(sys, "argv", ["next.py", str(overlay), "--wheel", str(wheel)])
    next.main()
    next.main()  # it fits, and is left alone
    assert len(pip) == 1 and {*next.ADDED} <= {*pip[0]}
    code = "import importlib.metadata as m, numpy, vllm._version as v; print(v.__file__, v.version, m.version('vllm'))"
    said = run([overlay / "bin/python", "-c", code], capture_output=True, text=True, check=True).stdout.split()
    version = f"9.9.9+cpu.over.{importlib.metadata.version('vllm-cpu')}"
    assert said[0].startswith(str(overlay)) and said[1:] == [version, version]
    libraries = list(overlay.rglob("vllm/**/*.so"))
    assert libraries and not any(library.is_relative_to(overlay) for library in map(Path.resolve, libraries))


def test_every_test_has_its_group() -> None:
    claimed = {path for group in test.GROUPS.values() for path in group.paths}
    assert set(test.OWN_PROCESS) <= claimed
    for path in claimed | set(test.OWN_PROCESS):
        assert (ROOT / "tests" / path).exists()
    for group in test.GROUPS.values():
        assert group.command or group.paths or set(group.without) == set(test.OWN_PROCESS)
    for group in test.NEXT_GROUPS.values():
        assert all((ROOT / "tests" / path).exists() for path in group.paths + group.without)


def test_make_help_names_every_target() -> None:
    command = ["make", "--no-print-directory", "help"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    makefile = (ROOT / "Makefile").read_text()
    phony = {line.split()[1] for line in makefile.splitlines() if line.startswith(".PHONY:")}
    assert phony - {"next", "next-wheel", "torchvision"} == {line.split()[1] for line in listed.splitlines()}


def test_only_their_own_tests_import_the_benchmarks() -> None:
    """benchmarks/ and models/ import tests/support, never the reverse."""
    files = (file for file in (ROOT / "tests").rglob("*.py") if "benchmarks" not in file.parts[-2:])
    imports = re.compile(r"^\s*(from|import) (benchmarks|models)\b", re.MULTILINE)
    assert [str(file) for file in files if imports.search(file.read_text())] == []
