"""Generated parts are up to date, and links lead somewhere."""

import re
from pathlib import Path

import pytest

from tools import docs

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")})


def test_generated_parts_are_up_to_date() -> None:
    assert docs.outdated() == [], "run `make docs`"


def test_demo_result_carries_its_configuration() -> None:
    import json

    result = json.loads(docs.DEMO_RESULT.read_text())
    configuration = result["configuration"]
    assert {"versions", "cpu", "engine", "environment", "prompts", "max_tokens", "repeats"} <= set(configuration)
    assert configuration["prompts"] >= 16
    assert [(arm["arm"]["name"], arm["arm"]["k"]) for arm in result["arms"]] == [
        ("none", 0),
        *(("EAGLE-3", k) for k in (3, 5)),
        *(("P-EAGLE", k) for k in (3, 5, 7)),
    ]
    for arm in result["arms"]:
        assert arm["same_output"]
        for samples in arm["samples"].values():
            assert len(samples) == configuration["repeats"]


def test_committed_sweep_is_the_whole_suite() -> None:
    """Every cell of benchmarks/suites/tiny-cpu.yaml, whole, with where it comes from, and no path of a machine."""
    from peagle_vllm.bench.cells import grid, read_results
    from peagle_vllm.bench.suite import read_suite

    if not docs.TINY_SWEEP.exists():
        assert "No sweep is committed yet." in (ROOT / "docs/benchmarking.md").read_text()
        return
    suite = read_suite(ROOT / "benchmarks/suites/tiny-cpu.yaml")
    found = read_results(docs.TINY_SWEEP)
    assert {r.cell for r in found} == set(grid(suite))
    assert all(r.ok and r.versions and r.hardware and r.raw["latencies"] for r in found)
    for file in (docs.TINY_SWEEP / "cells").iterdir():
        assert not re.search(r'"(/[a-z]|~)', file.read_text().replace('"/v1/completions"', "")), file.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    broken = [link for link in targets if "://" not in link and not (page.parent / link).exists()]
    assert not broken
