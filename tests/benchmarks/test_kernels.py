"""The kernel benchmark: its shapes, its bytes, and a run on tiny ones."""

import torch

from benchmarks.kernels import KERNELS, REPEATS, Shape, moved_bytes
from tests.benchmarks.running import is_summary, run_script


def test_bytes_of_a_batch_by_hand():
    """K = 1, two requests, the second with one of its two rows refused: 3 valid rows, 4 draft rows, 4 staged."""
    moved = moved_bytes(Shape("decode", 2, 2, 1, width=10).case(torch.bfloat16))
    indices = 3 * 12 + 4 * 28 + 2 * 24
    assert moved["prepare_inputs"] == (3 + 4) * 3 * 20 + indices
    assert moved["gather_hidden"] == (3 + 1 + 4) * 20 + 4 * 4
    assert moved["both"] == moved["prepare_inputs"] + moved["gather_hidden"]


def test_runs_on_tiny_shapes(tmp_path):
    printed, result = run_script("kernels", tmp_path / "kernels.json")
    assert result["device"].startswith("CPU")
    assert "not a GPU result" in printed
    assert {"dtype", "num_aux", "repeats", "copy_bytes_per_second", "cells"} <= set(result)
    assert [cell["kind"] for cell in result["cells"]] == ["decode", "prefill"]
    for cell in result["cells"]:
        assert {"reqs", "query", "k", "width"} <= set(cell)
        assert set(cell["arms"]) == set(KERNELS)
        for arm in cell["arms"].values():
            assert is_summary(arm["device_us"], REPEATS)
            assert is_summary(arm["host_us"], REPEATS)
            assert arm["of_copy_bandwidth"] > 0
