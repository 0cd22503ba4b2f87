"""The draft-step benchmark: its bound, its graph sizes, its aims, and a run on a tiny head."""

import pytest

from benchmarks import draft_step
from benchmarks.engines import graph_sizes
from benchmarks.shapes import Head, Model
from tests.benchmarks.running import is_summary, run_script


def test_bytes_by_hand():
    """Hidden 4, two query heads and one KV head of 2, MLP 8 wide, 10 of 20 tokens: every weight counted once."""
    head = Head("x", Model(4, 4, 2, 1, 2, 8, 20), intermediate=8, draft_vocab=10)
    qkv, mlp, out = 4 * (2 + 1 + 1) * 2, 3 * 4 * 8, 4 * 4
    layers = 2 * qkv + 3 * qkv + 4 * (mlp + out)
    assert head.weights(parallel=True) == {"fc": 48, "layers": layers, "lm_head": 40}
    assert draft_step.least_bytes(head, 3, 2, parallel=True) == 2 * (48 + layers + 40 + 8 * 12 + 12 * 4)
    one = 2 * qkv + mlp + out
    assert draft_step.least_bytes(head, 3, 2, parallel=False) == 2 * (48 + 3 * (one + 40) + 2 * 12 + 6 * 4)


@pytest.mark.parametrize("k", [3, 5, 7, 10])
def test_every_arm_has_a_graph_for_its_rows(k):
    """V1 drops what rounding to whole requests lifts over the largest size: that must be none of these."""
    batches = [1, 4, 16, 64, 256]
    sizes = graph_sizes(batches, k)
    largest = sizes["max_cudagraph_capture_size"]
    rounded = {-(-size // (k + 1)) * (k + 1) for size in sizes["cudagraph_capture_sizes"]}
    assert max(rounded) == largest
    for n in batches:
        for rows in (n, n * (k + 1), n * 2 * k):
            assert any(size >= rows for size in rounded)


def cell(arm: str, batch: int, device_us: float, launches: tuple[int, int] = (1, 1)) -> dict:
    calls = dict(zip(("kernel_launches", "graph_launches", "copies"), (*launches, 0), strict=True))
    times = {"device_us": {"median": device_us}, "roofline_us": 100.0, "launches": calls}
    return {"arm": arm, "head": "h", "k": 7, "batch": batch, **times}


def test_aims_are_judged():
    cells = [cell("stock V1", 1, 300), cell("plugin V2", 1, 120), cell("stock V1", 64, 300, (55, 6))]
    cells += [cell("plugin V2", 64, 270, (2, 1)), cell("EAGLE-3 V2", 64, 540)]
    found = {(r["what"], r["batch"]): (r["value"], r.get("met")) for r in draft_step.ratios(cells)}
    assert found["of stock V1", 1] == (0.4, True)
    assert found["of stock V1", 64] == (0.9, False)
    assert found["of the roofline", 1] == (1.2, True)
    assert found["of EAGLE-3 V2", 64] == (0.5, None)  # no aim
    assert found["launches", 1][1]
    assert not found["launches", 64][1]


def test_runs_on_a_tiny_head(tmp_path):
    chosen = ["--arms", "plugin V1", "--heads", "tiny, reduced vocabulary", "--batch", "2", "--repeats", "2"]
    printed, result = run_script("draft_step", tmp_path / "draft_step.json", *chosen)
    assert result["device"].startswith("CPU")
    assert "not a GPU result" in printed
    assert {"copy_bytes_per_second", "repeats", "llm", "ratios", "failed", "cells"} <= set(result)
    assert (result["failed"], result["ratios"]) == ([], [])
    (only,) = result["cells"]
    assert (only["arm"], only["k"], only["batch"]) == ("plugin V1", 3, 2)
    for column in ("device_us", "host_us"):
        assert is_summary(only[column], 2)
    assert only["bytes"] > 0
