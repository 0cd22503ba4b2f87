"""lookup_drafts: kernel and twin against a loop over a request's tokens."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle_kernels.lookup_drafts import MAX_MATCH, OneHot, lookup_drafts, lookup_drafts_torch
from tests.support.batches import KERNEL_DEVICE, moved
from tests.support.reference import looked_up

LENGTH, VOCAB = 40, 4
MAX_K = 7


@pytest.mark.parametrize("fn", [lookup_drafts_torch, lookup_drafts])
@pytest.mark.parametrize("q", [None, "probabilities", "logits", "cached"])
@settings(max_examples=40, deadline=None)
@given(
    lasts=st.lists(st.integers(0, LENGTH - 1), min_size=1, max_size=4),
    k=st.integers(1, MAX_K),
    min_match=st.integers(1, MAX_MATCH),
    seed=st.integers(0, 2**31),
    idle=st.booleans(),
    max_splits=st.sampled_from((1, 2, 4)),
)
def test_drafts_are_what_followed(fn, q, lasts, k, min_match, seed, idle, max_splits):
    """Rows of the request state in any order; what is not looked up stays, and a padding request touches nothing."""
    gen, num_reqs = torch.Generator().manual_seed(seed), len(lasts)
    token_ids = torch.randint(VOCAB + 1, (num_reqs + 2, LENGTH), generator=gen, dtype=torch.int32)  # VOCAB is no token
    rows = torch.randperm(num_reqs + 2, generator=gen)[:num_reqs]
    rows[-1] = -1 if idle else rows[-1]
    drafts = torch.randint(VOCAB, (num_reqs, MAX_K + 1), generator=gen)
    off, on, one_hot, dense = (-torch.inf, 0.0, None, None) if q != "probabilities" else (0.0, 1.0, None, None)
    if q:
        dense = torch.rand(num_reqs + 2, MAX_K, VOCAB, generator=gen)
        cached = torch.randint(VOCAB, (num_reqs + 2, MAX_K, 3), generator=gen) if q == "cached" else None
        if cached is not None:
            dense = torch.full_like(dense, off).scatter_(2, cached, dense)
        one_hot = OneHot(dense, rows, off, on, cached)
    last, expected = torch.tensor(lasts), drafts.clone()
    expected_q = None if dense is None else dense.clone()
    for req, (row, end) in enumerate(zip(rows.tolist(), lasts, strict=True)):
        copied = looked_up(token_ids[row, : end + 1].tolist(), k, min_match) if row >= 0 else None
        if copied:
            expected[req, :k] = torch.tensor(copied).clamp(max=VOCAB - 1)
            if expected_q is not None:
                expected_q[row, :k] = torch.full((k, VOCAB), off).scatter_(1, expected[req, :k, None], on)
    device = KERNEL_DEVICE if fn is lookup_drafts else "cpu"
    ours, *args = moved((drafts, token_ids, rows.repeat_interleave(3)[::3], last.repeat_interleave(2)[::2]), device)
    one_hot = moved(one_hot, device) if one_hot else None
    several_blocks = patch.multiple("peagle_kernels.lookup_drafts", BLOCK=16, MAX_SPLITS=max_splits)
    with several_blocks, patch("torch.empty", partial(torch.full, fill_value=2**40)):  # whatever memory held before
        fn(ours[:, :k], *args, min_match, VOCAB, one_hot)
    assert torch.equal(ours.cpu(), expected)
    if one_hot:
        assert torch.equal(one_hot.q.cpu(), expected_q)
        if one_hot.cached_ids is not None:  # what differs from off is named, for whoever clears it next
            left = one_hot.q.scatter(2, one_hot.cached_ids, off)
            assert bool((left == off).all())
