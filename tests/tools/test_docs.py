"""Generated parts are up to date, links lead somewhere, and what the pages name is there."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tools import docs

ROOT = Path(__file__).resolve().parents[2]
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
    rooms = set(re.findall(r"\w+", ARCHITECTURE.split("## A batch")[0]))
    there = {
        Path(file).relative_to(package).parts[0].removesuffix(".py")
        for package in ("src/peagle_vllm", "src/peagle_tools", "kernels/peagle_kernels")
        for file in FILES
        if file.startswith(f"{package}/") and file.endswith(".py")
    }
    assert not there - rooms - {"__init__", "cli"}
    from peagle_vllm.patches import all_patches

    assert [patch.name for patch in all_patches() if f"| `{patch.name}` |" not in ARCHITECTURE] == []
