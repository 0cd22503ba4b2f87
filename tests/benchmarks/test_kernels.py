"""The kernel benchmark's bytes, by hand; rung 1's rehearsal runs it on a tiny shape."""

from benchmarks import kernels
from peagle_kernels.layout import DraftBatch


def test_bytes_of_a_batch_by_hand():
    """K = 1, two requests of two rows: 4 rows are read and staged; each request has 2 draft rows and a sample."""
    moved = kernels.moved_bytes(DraftBatch(2, 4, 1, 4, 2), row=20)
    indices = 4 * 12 + 4 * 28 + 2 * 24
    assert moved == {"prepare_inputs": (4 + 4) * 3 * 20 + indices, "gather_hidden": (4 + 1 + 4) * 20 + 4 * 4}
