"""lookup_drafts: where a request's last tokens occurred before in it, its draft is what followed them there.

Of all earlier occurrences the one counts that agrees with most of the last ``MAX_MATCH`` tokens, and of those the
latest. What followed it repeats itself where it reaches the request's end. Other requests keep their drafts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle_kernels.dispatch import runs_twin

MAX_MATCH = 5  # tokens
BLOCK = 1024  # tokens that a program compares at once
MAX_SPLITS = 32  # programs of a request


class OneHot(NamedTuple):
    """Where the rejection sampler reads the distribution that a draft was drawn from: a draft looked up has one token.

    With ``cached_ids`` only those entries of q differ from ``off``; without, every entry is written.
    """

    q: Tensor  # [rows, K_max, target vocabulary] float
    rows: Tensor  # [num_reqs] int64, of q; -1 is inert
    off: float
    on: float
    cached_ids: Tensor | None  # [rows, K_max, M] int64


def lookup_drafts(
    drafts: Tensor,
    token_ids: Tensor,
    rows: Tensor,
    last: Tensor,
    min_match: int,
    vocab_size: int,
    one_hot: OneHot | None = None,
) -> None:
    """Replace the drafts of every request whose last ``min_match`` tokens occurred before in it.

    Args:
        drafts: [num_reqs, K] int64 target token ids.
        token_ids: [*, max_len] int32, the tokens of requests.
        rows: [num_reqs] int64, of ``token_ids``; -1 is inert.
        last: [num_reqs] int64, index of the last known token, the bonus token.
        min_match: 1 to ``MAX_MATCH``.
        vocab_size: of the target; a draft is below it, whatever a prompt holds.
        one_hot: where the distribution of probabilistic drafts stands.
    """
    if runs_twin(drafts):
        return lookup_drafts_torch(drafts, token_ids, rows, last, min_match, vocab_size, one_hot)
    # Two launches. The first spreads a request's tokens over programs; those past its last token end at once.
    request = token_ids, token_ids.stride(0), rows, rows.stride(0), last, last.stride(0)
    num_splits = min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(token_ids.shape[1], BLOCK)))
    matches = torch.empty((len(drafts), num_splits), dtype=torch.int64, device=drafts.device)
    sizes = {"NUM_SPLITS": num_splits, "BLOCK": BLOCK}
    _longest_match_kernel[matches.shape](matches, *request, MAX_MATCH=MAX_MATCH, **sizes)
    q, q_rows, off, on, cached_ids = one_hot or (None, None, 0.0, 1.0, None)
    _lookup_drafts_kernel[drafts.shape](
        drafts,
        drafts.stride(0),
        *request,
        matches,
        min_match,
        vocab_size,
        q,
        q_rows,
        0 if q_rows is None else q_rows.stride(0),
        cached_ids,
        *((0, 0) if q is None else q.stride()[:2]),
        0 if cached_ids is None else cached_ids.stride(0),
        OFF=off,
        ON=on,
        VOCAB=0 if q is None else q.shape[2],
        NUM_CACHED=0 if cached_ids is None else cached_ids.shape[2],
        BLOCK_CACHED=1 if cached_ids is None else triton.next_power_of_2(cached_ids.shape[2]),
        **sizes,
    )


def lookup_drafts_torch(
    drafts: Tensor, token_ids: Tensor, rows: Tensor, last: Tensor, min_match: int, vocab: int, one_hot: OneHot | None
) -> None:
    """The meaning of ``lookup_drafts`` in plain torch, and what a CPU runs."""
    num_k, length = drafts.shape[1], int(last.max()) + 1
    tokens = token_ids[rows.clamp(min=0), :length]
    matched, end = longest_match(tokens, last)
    has_match = (matched >= min_match) & (rows >= 0)
    period = (last - end).clamp(min=1)[:, None]
    following = (end[:, None] + 1 + torch.arange(num_k) % period).clamp(max=length - 1)
    followed = tokens.gather(1, following).long().clamp(0, vocab - 1)
    drafts[has_match] = followed[has_match]
    if one_hot:
        at = one_hot.rows[has_match]
        one_hot.q[at, :num_k] = torch.full_like(one_hot.q[at, :num_k], one_hot.off).scatter_(
            2, drafts[has_match][..., None], one_hot.on
        )
        if one_hot.cached_ids is not None:
            one_hot.cached_ids[at, :num_k] = drafts[has_match][..., None]


def longest_match(tokens: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """The earlier occurrence that agrees with most of a request's last tokens, and of those the latest.

    Args:
        tokens: [num_reqs, length] integers.
        last: [num_reqs] int64, index of the last known token.

    Returns:
        matched: [num_reqs] int64, the tokens that agree, 0 to ``MAX_MATCH``; end: [num_reqs] int64, index of the last
        of them at the earlier place.
    """
    length = tokens.shape[1]
    is_hit = (tokens == tokens.gather(1, last[:, None])) & (torch.arange(length) < last[:, None])
    req, end = is_hit.nonzero(as_tuple=True)  # few: the other tokens are compared there alone
    agrees, matched = torch.ones_like(end, dtype=torch.bool), torch.ones_like(end)
    for i in range(1, MAX_MATCH):
        agrees &= (end >= i) & (tokens[req, (end - i).clamp(min=0)] == tokens[req, (last[req] - i).clamp(min=0)])
        matched += agrees
    best = torch.zeros_like(last).scatter_reduce_(0, req, matched * length + end, "amax")
    return best // length, best % length


# Each K of a schedule is a step of its own: no variant may compile while requests wait.
@triton.jit(do_not_specialize=["rows_step", "last_step"])
def _longest_match_kernel(
    matches_ptr,  # [num_reqs, NUM_SPLITS] int64: tokens that agree * (last + 1), and the index of the last one; or 0
    token_ids_ptr,  # [*, max_len]
    token_ids_stride,
    rows_ptr,  # [num_reqs]
    rows_step,
    last_ptr,  # [num_reqs]
    last_step,
    NUM_SPLITS: tl.constexpr,
    MAX_MATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for every ``NUM_SPLITS``-th block of a request's tokens. Programs without a block store nothing."""
    req, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + req * rows_step).to(tl.int64)
    last = tl.load(last_ptr + req * last_step)
    if row < 0:
        return
    if split * BLOCK >= last:
        return
    tokens = token_ids_ptr + row * token_ids_stride
    best = tl.zeros((), tl.int64)
    for start in range(split * BLOCK, last, NUM_SPLITS * BLOCK):
        end = start + tl.arange(0, BLOCK)
        agrees = end < last
        matched = tl.zeros([BLOCK], tl.int64)
        for i in tl.static_range(MAX_MATCH):
            agrees = agrees & (end >= i)
            token = tl.load(tokens + end - i, mask=agrees, other=-1)
            agrees = agrees & (token == tl.load(tokens + tl.maximum(last - i, 0)))
            matched += agrees.to(tl.int64)
        best = tl.maximum(best, tl.max(tl.where(matched > 0, matched * (last + 1) + end, 0), axis=0))
    tl.store(matches_ptr + req * NUM_SPLITS + split, best)


@triton.jit(
    do_not_specialize=["drafts_stride", "rows_step", "last_step", "min_match", "vocab_size", "q_stride", "q_rows_step"]
)
def _lookup_drafts_kernel(
    drafts_ptr,  # [num_reqs, K]
    drafts_stride,
    token_ids_ptr,  # [*, max_len]
    token_ids_stride,
    rows_ptr,  # [num_reqs]
    rows_step,
    last_ptr,  # [num_reqs]
    last_step,
    matches_ptr,  # [num_reqs, NUM_SPLITS]
    min_match,
    vocab_size,
    q_ptr,  # [rows, K_max, VOCAB], or None
    q_rows_ptr,  # [num_reqs], or None
    q_rows_step,
    cached_ids_ptr,  # [rows, K_max, NUM_CACHED], or None
    q_stride,
    q_column,
    cached_ids_stride,
    OFF: tl.constexpr,
    ON: tl.constexpr,
    VOCAB: tl.constexpr,
    NUM_CACHED: tl.constexpr,
    BLOCK_CACHED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for each draft."""
    req, column = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + req * rows_step).to(tl.int64)
    last = tl.load(last_ptr + req * last_step)
    if row < 0:
        return
    split = tl.arange(0, NUM_SPLITS)
    best = tl.max(tl.load(matches_ptr + req * NUM_SPLITS + split, mask=split * BLOCK < last, other=0), axis=0)
    if best // (last + 1) < min_match:
        return
    end = best % (last + 1)
    token = tl.load(token_ids_ptr + row * token_ids_stride + end + 1 + column % (last - end)).to(tl.int64)
    token = tl.minimum(tl.maximum(token, 0), vocab_size - 1)
    tl.store(drafts_ptr + req * drafts_stride + column, token)
    if q_ptr is not None:
        q_row = tl.load(q_rows_ptr + req * q_rows_step)
        q = q_ptr + q_row * q_stride + column * q_column
        if cached_ids_ptr is not None:
            m = tl.arange(0, BLOCK_CACHED)
            cached = cached_ids_ptr + q_row * cached_ids_stride + column * NUM_CACHED + m
            tl.store(q + tl.load(cached, mask=m < NUM_CACHED, other=0), OFF, mask=m < NUM_CACHED)
            tl.debug_barrier()
            tl.store(cached, token, mask=m < NUM_CACHED)
        else:
            for first in range(0, VOCAB, BLOCK):
                entry = first + tl.arange(0, BLOCK)
                tl.store(q + entry, OFF, mask=entry < VOCAB)
            tl.debug_barrier()
        tl.store(q + token, ON)
