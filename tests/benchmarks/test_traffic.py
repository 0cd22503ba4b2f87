"""The traffic simulation: its acceptance, what it counts, and that the committed shares have their reasons."""

import json

import pytest

from benchmarks import traffic
from tests.benchmarks.running import ROOT, run_script


@pytest.mark.parametrize(("length", "k"), [(3.0, 7), (1.0, 3), (3.9, 3)])
def test_acceptance_rate_gives_the_length(length: float, k: int):
    rate = traffic.acceptance_rate(length, k)
    assert sum(rate**i for i in range(k + 1)) == pytest.approx(length)


def test_a_short_trace(tmp_path):
    """At 64 in flight every sixth step carries a prefill: before, each of those drafted eagerly."""
    chosen = ["--cases", "H200:64", "--steps", "60", "--warm", "90"]
    printed, result = run_script("traffic", tmp_path / "traffic.json", *chosen)
    (case,) = result["cases"]
    share = case["share"]
    assert "H200, 64" in printed
    assert 0 < share["with a prefill"] == share["eager before"] < 0.5
    assert share["FULL"] + share["PIECEWISE"] == pytest.approx(1)
    assert share["PIECEWISE"] == share["with a prefill"]
    assert (share["eager"], case["eager_reasons"]) == (0, {})
    assert 0 < case["requests_a_step"] < 64
    assert 0 < case["padding"] < 0.1


def test_every_committed_eager_step_has_its_reason():
    result = json.loads((ROOT / "benchmarks/results/traffic.json").read_text())
    assert {f"{case['server']}:{case['c']}" for case in result["cases"]} == set(traffic.CASES)
    for case in result["cases"]:
        assert sum(case["eager_reasons"].values()) == pytest.approx(case["share"]["eager"] * case["steps"])
        assert set(case["eager_reasons"]) <= {"a prefill of more rows than the largest piecewise graph"}
