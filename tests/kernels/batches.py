"""Random target batches for the kernel tests; ``tests.support.batches`` builds them."""

import os

import torch
from hypothesis import strategies as st

from tests.support.batches import Case, Request, build

POISON = 0x5A5A  # what every output element holds before a kernel runs
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNEL_DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


@st.composite
def cases(draw) -> Case:
    max_k = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 11, 18]))
    k = draw(st.integers(0, max_k))
    static = draw(st.booleans())
    # Room for the widest static request, so that only ragged prefills can outgrow max_model_len.
    max_model_len = draw(st.integers(2 * max_k + 1, 2 * max_k + 40))
    requests = []
    for _ in range(draw(st.integers(1, 6))):
        n = draw(st.integers(1, min(max_k + 1, max_model_len) if static else max_model_len))
        p0 = draw(st.integers(0, max_model_len - n))
        rejected = draw(st.integers(0, min(n - 1, max_k)))
        samples = rejected > 0 or draw(st.booleans())
        requests.append(Request(p0, n, rejected, samples, draw(st.integers(0, 9)) == 0))
    return build(
        requests,
        k=k,
        max_k=max_k,
        static=static,
        shape_k=draw(st.integers(k, max_k)) if static else None,
        max_model_len=max_model_len,
        num_padding_reqs=draw(st.integers(0, 2)) if static else 0,
        num_padding_rows=draw(st.integers(0, 3)),
        block_sizes=draw(st.lists(st.sampled_from([4, 16]), min_size=0, max_size=2)),
        widths=draw(st.lists(st.sampled_from([3, 8]), min_size=0, max_size=4)),
        seed=draw(st.integers(0, 2**31)),
    )
