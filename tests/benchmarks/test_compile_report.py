"""The compiler's report: its table, and that the committed file is about today's shapes."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia")

from benchmarks import compile_report

RESULT = Path(__file__).resolve().parents[2] / "benchmarks/results/compile.json"


def test_table():
    entry = {
        "kernel": "prepare_inputs",
        "arch": "sm_90",
        "layout": "static",
        "dtype": "torch.bfloat16",
        "registers": 31,
    }
    entry |= {"shared_bytes": 0, "spill_bytes": 4, "loads": {"128": 9, "32": 1}, "stores": {"128": 9}}
    heading, line = compile_report.table([entry]).splitlines()
    assert line.split() == ["prepare_inputs", "sm_90", "static", "bfloat16", "31", "0", "4", "9x128", "1x32", "9x128"]
    assert "spills" in heading


def test_committed_result_covers_what_the_suite_compiles():
    result = json.loads(RESULT.read_text())
    compiled = [{key: entry[key] for key in compile_report.FIELDS if key in entry} for entry in result["kernels"]]
    wanted = [
        {"arch": f"sm_{arch}", **name}
        for arch in compile_report.ARCHITECTURES
        for name, _compile in compile_report.shapes(arch)
    ]
    assert compiled == [{key: name[key] for key in compile_report.FIELDS if key in name} for name in wanted]
    assert all(entry["spill_bytes"] == 0 for entry in result["kernels"])
    assert set(result["ptxas"]) == {"sm_90", "sm_100"}
