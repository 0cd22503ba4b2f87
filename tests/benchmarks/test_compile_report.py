"""The compiler's report: the committed file is about today's shapes."""

import json

import pytest

pytest.importorskip("triton.backends.nvidia")

from benchmarks import compile_report
from tests.benchmarks.running import ROOT


def test_committed_result_covers_what_the_suite_compiles():
    result = json.loads((ROOT / "benchmarks/results/compile.json").read_text())
    wanted = [
        {"arch": f"sm_{arch}", **name}
        for arch in compile_report.ARCHITECTURES
        for name, _compile in compile_report.shapes(arch)
    ]
    entries = result["kernels"]
    assert [{key: entry[key] for key in name} for entry, name in zip(entries, wanted, strict=True)] == wanted
    assert all(entry["spill_bytes"] == 0 for entry in entries)
    assert set(result["ptxas"]) == {"sm_90", "sm_100"}
