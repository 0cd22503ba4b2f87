"""Choosing drafts from the logits of sampled rows, against one read of those logits: a part of ``benchmarks.gpu_day``.

``argmax`` is what greedy drafts take; ``topk`` and ``select_candidates`` are what drafts of a selector, or drawn ones
within a request's limits, take. Without a GPU: a tiny shape, the twins, greedy drafts, the wall clock.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks import arms
from benchmarks.arms import HAS_GPU
from benchmarks.timing import copy_bandwidth, device_us
from peagle_kernels.dispatch import runs_twin
from peagle_kernels.select_candidates import Candidates, CandidateSelector, Drawing, select_candidates

DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
REQUESTS, K = ((1, 64), 7) if HAS_GPU else ((1,), 3)
VOCAB, CANDIDATES = (201_088, (16, 64)) if HAS_GPU else (512, (4,))  # tokens, and candidates of a row
RANK = 64  # of the committed heads' selectors


@triton.jit
def best_within_limits(scores, tokens, is_candidate, seed, position, column, temperature, USE_FP64: tl.constexpr):
    """In place of vLLM's draw, which adds noise to each score first."""
    return tl.argmax(scores, axis=0)


def calls(num_reqs: int, k: int, vocab: int, num_candidates: int) -> dict[str, Callable[[], Any]]:
    """A call of each step on this device, with buffers that exist already."""
    num_samples = num_reqs * k
    rows = {"device": DEVICE, "dtype": torch.int64}
    requests = torch.arange(num_reqs, **rows)
    logits = torch.randn(num_samples, vocab, device=DEVICE, dtype=DTYPE)
    best, ids = logits.topk(num_candidates)
    input_ids = torch.zeros(num_samples, device=DEVICE, dtype=torch.int32)
    candidates = Candidates(ids, best.float(), None, input_ids, torch.arange(num_samples, **rows))
    codebooks = (torch.randn(vocab, RANK, device=DEVICE, dtype=DTYPE) for _ in range(2))
    scales = torch.ones(2, 1, device=DEVICE)
    selector = CandidateSelector(*codebooks, None, *scales, num_candidates)
    out, scores = torch.empty(num_reqs, k, **rows), torch.empty_like(candidates.logits)
    drawing = Drawing(
        best_within_limits,
        idx_mapping=requests.repeat_interleave(k),
        positions=torch.arange(num_samples, **rows),
        temperature=torch.full((num_reqs,), 0.7, device=DEVICE),
        seeds=requests,
        top_k=torch.full((num_reqs,), num_candidates // 2, device=DEVICE, dtype=torch.int32),
        top_p=torch.full((num_reqs,), 0.9, device=DEVICE),
        draft_logits=torch.full((num_reqs, k, vocab), -float("inf"), device=DEVICE),
        cached_ids=torch.zeros(num_reqs, k, num_candidates, **rows),
        use_fp64=False,
    )

    draw = None if runs_twin(out) else drawing
    return {
        "argmax": lambda: logits.argmax(-1),
        "topk": lambda: logits.topk(num_candidates),
        "select_candidates": lambda: select_candidates(out, candidates, selector, None, scores, draw),
    }


@torch.inference_mode()
def run_all() -> Iterator[dict[str, Any]]:
    """A cell for each number of requests and candidates and each step, in this process."""
    bandwidth = copy_bandwidth()
    for num_reqs in REQUESTS:
        one_read = num_reqs * K * VOCAB * DTYPE.itemsize / bandwidth * 1e6
        for num_candidates in CANDIDATES:
            for name, call in calls(num_reqs, K, VOCAB, num_candidates).items():
                us = arms.summary(device_us(call))
                shape = {"kernel": name, "rows": num_reqs * K, "width": VOCAB, "candidates": num_candidates}
                yield {**shape, "device_us": us, "reads of the logits": float(f"{us['median'] / one_read:.3g}")}
