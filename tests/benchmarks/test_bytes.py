"""What a draft step and the kernels of a prefill must move, by hand."""

from benchmarks.kernels import moved_bytes
from benchmarks.shapes import HeadShape
from peagle_kernels.layout import DraftBatch


def test_a_draft_step() -> None:
    """Two requests, three drafts each. Hidden 4, MLP 8, two query heads and one KV head of 2, 10 tokens."""
    attention = 4 * 4 + 2 * 4 * 2 + 4 * 4  # q, k and v, o; the first layer's q, k and v are twice as wide
    layers = (attention + 4 * 4 + 2 * 4 * 2) + 3 * attention + 4 * (3 * 4 * 8)
    hidden_states = 2 * 4 * 12 + 2 * 6 * 4  # K+1 rows of fc, 2K rows of the layers
    moved = HeadShape(4, 8, 2, 1, 2, 10).step_bytes(3, 2, parallel=True)
    assert moved == 2 * (12 * 4 + layers + 10 * 4 + hidden_states)


def test_kernels() -> None:
    """K = 1, two requests of two rows: 4 rows are read and staged; each request has 2 draft rows and a sample."""
    indices = 4 * 12 + 4 * 28 + 2 * 24
    moved = ((4 + 4) * 3 * 20 + indices, (4 + 1 + 4) * 20 + 4 * 4)
    assert moved_bytes(DraftBatch(2, 4, 1, 4, 2), row=20) == moved
