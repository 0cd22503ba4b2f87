"""limit_logits: kernel and twin against a sampler that sorts."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from peagle_kernels import limit_logits_torch, limit_logits_triton
from tests.kernels.batches import KERNEL_DEVICE
from tests.sampling.statistics import limited
from tests.support.batches import moved

LIMITS = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    st.sampled_from([1, 2, 7, 60, 1000]),
    st.sampled_from([0.0, 1e-6, 0.3, 0.9, 1.0]),
)


@pytest.mark.parametrize("fn", [limit_logits_torch, limit_logits_triton])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=12, deadline=None, phases=[Phase.generate])  # to shrink takes the interpreter minutes
@given(
    requests=st.lists(LIMITS, min_size=1, max_size=3),
    width=st.integers(1, 70),
    reduced=st.booleans(),
    idle=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_tokens_outside_the_limits_are_dropped(fn, dtype, requests, width, reduced, idle, seed):
    """Two rows a request, in any order. A head with a reduced vocabulary gives -inf for the rest."""
    gen, rows = torch.Generator().manual_seed(seed), list(range(len(requests))) * 2
    wide = torch.stack([torch.randperm(2 * width, generator=gen) for _ in rows])  # no two of a row are equal
    logits = (wide / 32).to(dtype)
    if reduced:
        logits[:, 1:width:2] = -torch.inf
    idx_mapping = torch.tensor(rows)[torch.randperm(len(rows), generator=gen)]
    idx_mapping[-1] = -1 if idle else idx_mapping[-1]
    temperature, top_k, top_p = (torch.tensor(numbers) for numbers in zip(*requests, strict=True))
    expected = logits.clone()
    for at, row in enumerate(idx_mapping.tolist()):
        if row >= 0:
            heat, k, p = requests[row]
            line = expected[at : at + 1, :width]
            kept = limited(line.float(), heat or 1.0, k if k < width else 0, max(p, 1e-9) if p < 1 else 2)
            expected[at, :width] = torch.where(kept.isinf(), -torch.inf, line)
    ours, *args = moved((logits, idx_mapping, temperature, top_k.int(), top_p), KERNEL_DEVICE)
    with patch("peagle_kernels.limit_logits.BLOCK", 32):  # several blocks a row
        fn(ours[:, :width], *args)
    assert torch.equal(ours.cpu(), expected)
