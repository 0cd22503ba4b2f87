"""The geometry of a P-EAGLE draft batch. Everything else is checked against this file.

After a target step, request ``b`` has verified ``n`` rows at positions
``p0 .. p0+n-1`` and ``rejected`` of their tokens were refused, so
``p_last = p0 + n - 1 - rejected`` is its last valid position. The drafter reads, at
rotary position ``p``, the pair (token at ``p+1``, hidden state at ``p``):

    rows     (x[p0+1], h[p0]) .. (bonus, h[p_last])    (MASK, m) x (D-1)
    position  p0              ..  p_last                p_last+1 .. p_last+D-1

and the rows ``p_last .. p_last+K-1`` yield the K draft tokens. ``m`` is the learned
``mask_hidden`` after the head's ``fc``; ``D = max(K, 1)``, because a step that drafts
nothing (K = 0) must still write the bonus row's KV.

**One rule, any layout.** Give the request any number of rows ``L`` that holds its valid
rows and its mask rows. They are right-aligned on the sequence:

    seq_len = max(L, min(p_last + D, max_model_len));   base = seq_len - L
    row r stands at position base + r
    draft token i is read from row min(p_last + i - base, L - 1)

Rows outside ``[p0, p_last + D)`` are padding: token 0, hidden 0, slot -1. A row at or
beyond ``max_model_len`` never writes KV. Attention is causal and end-aligned, so valid
and mask rows see exactly the keys they need. The ``max`` keeps every row a visible key;
without the ``min``, drafts next to ``max_model_len`` would shift.

Two layouts are used: *ragged*, ``L = min(n + D - 1, max_model_len)``, for prefill and
mixed batches, and *static*, ``L = V + D`` for every request, for decode batches, so that
one CUDA graph serves them all; ``V`` is the most drafts that a request has verified.

Worked example. K = 3, one request that verified n = 4 rows at positions 10..13, two
tokens refused: p_last = 11. Its tokens are x10 x11, the bonus is b.

    ragged, L = 6:   seq_len = 14, base = 8
    row        0     1     2     3     4     5
    position   8     9     10    11    12    13
    token      0     0     x11   b     MASK  MASK
    hidden     0     0     h10   h11   m     m
    slot      -1    -1     s10   s11   s12   s13
    sampled                      i=0   i=1   i=2
"""

from typing import NamedTuple

import torch
from torch import Tensor

MASK_ROW = -1  # row_map: this draft row takes the projected mask_hidden
PAD_ROW = -2  # row_map: this draft row is padding and takes zeros
PAD_SLOT = -1  # slot_mapping: write no KV (vLLM's PAD_SLOT_ID)


class Window(NamedTuple):
    """Where each request's rows stand. All int64 [num_reqs]."""

    p0: Tensor  # position of the first verified row
    num_valid: Tensor  # verified rows that were not refused
    p_last: Tensor  # position of the last valid row
    seq_len: Tensor  # keys visible to the last row
    base: Tensor  # position of draft row 0


class Rows(NamedTuple):
    """What each draft row holds. All [num_rows]."""

    req: Tensor  # int64, owning request
    position: Tensor  # int64, rotary position
    is_valid: Tensor  # bool, (next token, captured hidden state)
    is_mask: Tensor  # bool, (MASK, m)
    offset: Tensor  # int64, position - p0: index into the request's verified rows


def num_appended(num_speculative_tokens: int) -> int:
    """D: rows from the bonus row on. A step without drafts keeps the bonus row."""
    return max(num_speculative_tokens, 1)


def static_length(num_verified: int, num_speculative_tokens: int) -> int:
    """L of the static layout: holds any decode request, which has verified at most so many drafts and a token."""
    return num_verified + num_appended(num_speculative_tokens)


def window(
    query_start_loc: Tensor,
    positions: Tensor,
    num_rejected: Tensor,
    draft_query_start_loc: Tensor,
    num_speculative_tokens: int,
    max_model_len: int,
) -> Window:
    """Place each request's draft rows on its sequence.

    Args:
        query_start_loc: [num_reqs + 1] target rows of each request.
        positions: [num_target_rows] int64 position of each target row.
        num_rejected: [num_reqs] refused tokens.
        draft_query_start_loc: [num_reqs + 1] draft rows of each request (the layout).
    """
    start, end = query_start_loc[:-1], query_start_loc[1:]
    length = draft_query_start_loc[1:] - draft_query_start_loc[:-1]
    p0 = positions[start]
    num_valid = end - start - num_rejected
    p_last = p0 + num_valid - 1
    window_end = (p_last + num_appended(num_speculative_tokens)).clamp(max=max_model_len)
    seq_len = torch.maximum(length, window_end)
    return Window(p0, num_valid, p_last, seq_len, seq_len - length)


def rows(win: Window, draft_query_start_loc: Tensor, num_speculative_tokens: int) -> Rows:
    """Say what each draft row holds."""
    start = draft_query_start_loc
    req = torch.repeat_interleave((start[1:] - start[:-1]).long())
    row = torch.arange(len(req), device=req.device)
    position = (win.base - start[:-1])[req] + row
    offset = position - win.p0[req]
    after_last = position - win.p_last[req]
    is_valid = (offset >= 0) & (after_last <= 0)
    is_mask = (after_last > 0) & (after_last < num_appended(num_speculative_tokens))
    return Rows(req, position, is_valid, is_mask, offset)


def sample_rows(win: Window, draft_query_start_loc: Tensor, num_speculative_tokens: int) -> Tensor:
    """[num_reqs, K] draft row that yields each draft token."""
    start = draft_query_start_loc
    i = torch.arange(num_speculative_tokens, device=start.device)
    row = (win.p_last - win.base)[:, None] + i
    last = (start[1:] - start[:-1])[:, None] - 1
    return start[:-1, None] + torch.minimum(row, last)


def slots(
    position: Tensor, writes_kv: Tensor, req: Tensor, block_table: Tensor, block_size: int, max_model_len: int
) -> Tensor:
    """[num_rows] int64 KV slot of each draft row, PAD_SLOT where it must not write.

    A block table's columns past a request's allocation hold stale ids, so a position at or
    beyond ``max_model_len`` is never looked up, and block 0 (vLLM's null block) is never written.

    Args:
        block_table: [num_reqs, max_blocks] physical block ids.
        block_size: tokens a block.
    """
    writes_kv = writes_kv & (position < max_model_len)
    position = torch.where(writes_kv, position, 0)
    column = position // block_size
    block = block_table[req, column]
    # Widened by the column, which is int64: int32 block ids times a block's size can overflow.
    slot = position + (block - column) * block_size
    return torch.where(writes_kv & (block > 0), slot, PAD_SLOT)
