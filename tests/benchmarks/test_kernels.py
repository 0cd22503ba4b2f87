"""The kernel benchmark: its bytes, and a run on a tiny shape."""

import torch

from benchmarks import arms, sampled_rows
from benchmarks.kernels import batch, moved_bytes, run_all
from benchmarks.timing import REPEATS
from tests.benchmarks.running import is_summary
from tests.support.batches import Request


def test_bytes_of_a_batch_by_hand():
    """K = 1, two requests of two rows, one of them refused: 3 valid rows, 4 draft rows, 4 staged."""
    moved = moved_bytes(batch([Request(0, 2, 0), Request(0, 2, 1)], 1, 10, torch.bfloat16))
    indices = 3 * 12 + 4 * 28 + 2 * 24
    assert moved == {"prepare_inputs": (3 + 4) * 3 * 20 + indices, "gather_hidden": (3 + 1 + 4) * 20 + 4 * 4}


def test_choosing_drafts_on_a_tiny_shape():
    cells = list(sampled_rows.run_all())
    assert [(cell["kernel"], cell["rows"]) for cell in cells] == [
        (name, sampled_rows.K) for name in ("argmax", "topk", "select_candidates")
    ]
    for cell in cells:
        assert is_summary(cell["device_us"], REPEATS) and cell["reads of the logits"] > 0


def test_runs_on_a_tiny_shape():
    cells = list(run_all())
    assert [cell["kernel"] for cell in cells] == ["prepare_inputs", "gather_hidden"]
    for cell in cells:
        assert is_summary(cell["device_us"], REPEATS) and cell["of_copy_bandwidth"] > 0
    assert all(cell["kernel"] in arms.table(cells) for cell in cells)
