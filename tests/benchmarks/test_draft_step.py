"""The bounds, by hand."""

from benchmarks.draft_step import draft_step_roofline
from benchmarks.shapes import HeadShape, Model

# Hidden 4, two query heads and one KV head of 2, MLP 8 wide, 10 tokens, 3 hidden states.
SMALL = HeadShape(Model(4, 4, 2, 1, 2, 8, 10), intermediate=8)


def test_small_head_by_hand():
    """Two requests, three drafts each."""
    bound = draft_step_roofline(SMALL, 3, 2, parallel=True)
    attention = 4 * 4 + 2 * 4 * 2 + 4 * 4  # q, k and v, o; the first layer's q, k and v are twice as wide
    layers = (attention + 4 * 4 + 2 * 4 * 2) + 3 * attention + 4 * (3 * 4 * 8)
    assert bound == {
        "fc": 2 * 12 * 4,
        "layers": 2 * layers,
        "lm_head": 2 * 10 * 4,
        "hidden states": 2 * (2 * 4 * 12 + 2 * 6 * 4),  # K+1 rows of fc, 2K rows of the layers
    }
