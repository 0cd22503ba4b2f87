"""The tools behind `make`, and what they keep true: the environment's recipe, the groups of the suite, the pages."""

import json
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from tools import docs, env, test
from tools.env import ROOT

PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")})
FILES = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()


def test_generated_parts_are_up_to_date() -> None:
    assert not docs.outdated(), "run `make docs`"


def test_what_is_called_tested_has_a_test_on_that_runner() -> None:
    """Each such cell of the feature table, and no cell leaves open what it is; a file without arms has processes of its
    own."""
    table = (ROOT / "docs/features.md").read_text().partition("## Targets")[0]
    rows = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    cells = [(arm, cell, row) for row in rows for arm, cell in zip(("v1", "v2"), row[1:3], strict=True)]
    words = ("tested", "untested here", "refused", "vLLM cannot")
    assert [cell for _, cell, _ in cells if not cell.startswith(words)] == []
    tested = [(arm, row) for arm, cell, row in cells if cell.startswith("tested")]
    assert len(tested) > 30
    for arm, row in tested:
        named = [ROOT / name for name in re.findall(r"`(tests/[\w/.]+)`", row[-1])]
        texts = [file.read_text() for path in named for file in ([path] if path.is_file() else path.glob("test_*.py"))]
        assert any(f'"plugin-{arm}"' in text or "mark.arm" not in text for text in texts), (arm, row)


def test_figures_of_fuzzer_and_soaks() -> None:
    """The feature table has them."""
    page = (ROOT / "docs/features.md").read_text()
    seeds = [json.loads(line) for line in (docs.RESULTS / "fuzz.jsonl").read_text().splitlines()]
    for arm in ("plugin-v1", "plugin-v2"):
        rows = {seed["seed"]: seed["rows"] for seed in seeds if seed["arm"] == arm}
        assert [*rows] == [*range(len(rows))]  # a seed that differs has no line
        assert f"tested: {sum(rows.values()):,} rows, none different" in page
    row = next(line for line in page.splitlines() if line.startswith("| soak")).split(" | ")
    for name, cell in zip(("soak", "soak_v2"), row[1:3], strict=True):
        result = json.loads((docs.RESULTS / f"{name}.json").read_text())
        asked, compared = sum(result["requests"].values()), result["answers compared"]
        figures = f"{asked:,} requests, {compared:,} answers compared, none different"
        assert f"{figures} (`benchmarks/results/{name}.json`)" in cell and not result["wrong"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    broken = [link for link in targets if "://" not in link and not (page.parent / link).exists()]
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    """`folder/file.py::test`, by any ending of its path; `folder/`; `package.module`."""
    text = page.read_text()
    named = set(re.findall(r"`([\w./-]+\.(?:py|md|ya?ml|toml|svg|sh)(?:::\w+)?)`", text))
    named |= {f"{dotted.replace('.', '/')}.py" for dotted in re.findall(r"\b((?:benchmarks|tools)\.\w+)\b", text)}
    for name in sorted(named):
        path, *test = name.split("::")
        files = [file for file in FILES if f"/{file}".endswith(f"/{path}") or file.startswith(f"{path[:-3]}/")]
        assert files, f"{page.name} names {path}, which does not exist"
        assert all(f"def {wanted}" in (ROOT / files[0]).read_text() for wanted in test), f"{path} has no {test}"


def test_the_architecture_names_every_room() -> None:
    """Each folder of the three packages and each file next to them, and in the ledger each patch."""
    names = "\n".join(line[:30] for line in ARCHITECTURE.split("## A batch")[0].splitlines())
    there = {
        Path(file).relative_to(package).parts[0].removesuffix(".py")
        for package in ("src/peagle_vllm", "src/peagle_tools", "kernels/peagle_kernels")
        for file in FILES
        if file.startswith(f"{package}/") and file.endswith(".py")
    }
    assert not there - set(re.findall(r"\w+", names)) - {"__init__", "cli"}
    from peagle_vllm.patches import all_patches

    assert [patch.name for patch in all_patches() if f"| `{patch.name}` |" not in ARCHITECTURE] == []


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


def test_half_an_environment_is_completed_and_another_pythons_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Ubuntu without python3-venv leaves one without pip."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    with patch.object(env, "run", side_effect=InterruptedError) as ran, pytest.raises(InterruptedError):
        env.install(tmp_path, "0.32.0")
    ran.assert_called_once_with(sys.executable, "-m", "venv", tmp_path)
    monkeypatch.setattr(env, "output", lambda *_: "3.8")
    with pytest.raises(SystemExit, match=r"is not of Python 3.*: remove it, or name another folder"):
        env.install(tmp_path, "0.32.0")


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
