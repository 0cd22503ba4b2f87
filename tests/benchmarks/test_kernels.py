"""The kernel benchmarks: bytes by hand, and a run on a tiny shape."""

from typing import Any

from benchmarks import arms, kernels, sampled_rows
from benchmarks.timing import REPEATS
from peagle_kernels import DraftBatch


def test_bytes_of_a_batch_by_hand():
    """K = 1, two requests of two rows: 4 rows are read and staged; each request has 2 draft rows and a sample."""
    moved = kernels.moved_bytes(DraftBatch(2, 4, 1, 4, 2), row=20)
    indices = 4 * 12 + 4 * 28 + 2 * 24
    assert moved == {"prepare_inputs": (4 + 4) * 3 * 20 + indices, "gather_hidden": (4 + 1 + 4) * 20 + 4 * 4}


def test_on_a_tiny_shape():
    cells: list[dict[str, Any]] = [*kernels.run_all(), *sampled_rows.run_all()]
    names = ["prepare_inputs", "gather_hidden", "argmax", "topk", "select_candidates"]
    assert [cell["kernel"] for cell in cells] == names
    for cell in cells:
        samples = cell["device_us"]
        assert len(samples["samples"]) == REPEATS and samples["p10"] <= samples["median"] <= samples["p90"]
        assert cell.get("of_copy_bandwidth", cell.get("reads of the logits")) > 0
    assert all(name in arms.table(cells) for name in names)
