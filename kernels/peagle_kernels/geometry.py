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
mixed batches, and *static*, ``L = K_max + D`` for every request, for decode batches, so
that one CUDA graph serves them all.

Worked example. K = 3, one request that verified n = 4 rows at positions 10..13, two
tokens refused: p_last = 11. Its tokens are x10 x11, the bonus is b.

    ragged, L = 6:   seq_len = 14, base = 8
    row        0     1     2     3     4     5
    position   8     9     10    11    12    13
    token      0     0     x11   b     MASK  MASK
    hidden     0     0     h10   h11   m     m
    slot      -1    -1     s10   s11   s12   s13
    sampled                      i=0   i=1   i=2

The functions below take and return torch tensors or NumPy arrays alike (``Array``): each line means the
same in both. Torch runs on any device; NumPy, over the same memory, is what a CPU draft step uses, because
a call of it costs a fraction of torch's at these sizes.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

Array = Any  # torch.Tensor or numpy.ndarray, one kind in a call

MASK_ROW = -1  # row_map: this draft row takes the projected mask_hidden
PAD_ROW = -2  # row_map: this draft row is padding and takes zeros
PAD_SLOT = -1  # slot_mapping: write no KV (vLLM's PAD_SLOT_ID)


def library(array: Array) -> Any:
    """``torch`` or ``numpy``, whose functions of one name mean the same here."""
    return np if isinstance(array, np.ndarray) else torch


def at_most(array: Array, limit: int) -> Array:
    """Elementwise minimum with a number; NumPy's ``clip`` takes ten times as long for it."""
    return np.minimum(array, limit) if isinstance(array, np.ndarray) else array.clamp(max=limit)


def at_least(array: Array, limit: int) -> Array:
    """Elementwise maximum with a number."""
    return np.maximum(array, limit) if isinstance(array, np.ndarray) else array.clamp(min=limit)


class Window(NamedTuple):
    """Where each request's rows stand. All int64 [num_reqs]."""

    p0: Array  # position of the first verified row
    num_valid: Array  # verified rows that were not refused
    p_last: Array  # position of the last valid row
    seq_len: Array  # keys visible to the last row
    base: Array  # position of draft row 0


class Rows(NamedTuple):
    """What each draft row holds. All [num_rows]."""

    req: Array  # int64, owning request
    position: Array  # int64, rotary position
    is_valid: Array  # bool, (next token, captured hidden state)
    is_mask: Array  # bool, (MASK, m)
    offset: Array  # int64, position - p0: index into the request's verified rows


def num_appended(num_speculative_tokens: int) -> int:
    """D: rows from the bonus row on. A step without drafts keeps the bonus row."""
    return max(num_speculative_tokens, 1)


def ragged_lengths(num_query: Array, num_speculative_tokens: int, max_model_len: int) -> Array:
    """L of the ragged layout.

    Args:
        num_query: [num_reqs] verified rows of each request (an upper bound will do).
    """
    return at_most(num_query + (num_appended(num_speculative_tokens) - 1), max_model_len)


def static_length(max_speculative_tokens: int, num_speculative_tokens: int) -> int:
    """L of the static layout: holds any decode request, which verifies at most K_max + 1 rows."""
    return max_speculative_tokens + num_appended(num_speculative_tokens)


def seq_lens_bound(target_seq_lens: Array, lengths: Array, num_speculative_tokens: int, max_model_len: int) -> Array:
    """[num_reqs] upper bound of ``Window.seq_len``, for a host that does not know what was refused.

    Args:
        target_seq_lens: [num_reqs] upper bound of the target's sequence lengths.
        lengths: [num_reqs] L of each request.
    """
    window_end = at_most(target_seq_lens + (num_appended(num_speculative_tokens) - 1), max_model_len)
    return library(lengths).maximum(window_end, lengths)


def window(
    query_start_loc: Array,
    positions: Array,
    num_rejected: Array,
    draft_query_start_loc: Array,
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
    window_end = at_most(p_last + num_appended(num_speculative_tokens), max_model_len)
    seq_len = library(length).maximum(length, window_end)
    return Window(p0, num_valid, p_last, seq_len, seq_len - length)


def rows(win: Window, draft_query_start_loc: Array, num_speculative_tokens: int) -> Rows:
    """Say what each draft row holds."""
    start = draft_query_start_loc
    req = _owners(start[1:] - start[:-1])
    row = library(req).arange(len(req), device=req.device)
    position = (win.base - start[:-1])[req] + row
    offset = position - win.p0[req]
    after_last = position - win.p_last[req]
    is_valid = (offset >= 0) & (after_last <= 0)
    is_mask = (after_last > 0) & (after_last < num_appended(num_speculative_tokens))
    return Rows(req, position, is_valid, is_mask, offset)


def _owners(lengths: Array) -> Array:
    """[sum of lengths] index of the request that owns each row."""
    if isinstance(lengths, np.ndarray):
        return np.repeat(np.arange(len(lengths)), lengths)
    return torch.repeat_interleave(lengths.long())


def sample_rows(win: Window, draft_query_start_loc: Array, num_speculative_tokens: int) -> Array:
    """[num_reqs, K] draft row that yields each draft token."""
    start = draft_query_start_loc
    i = library(start).arange(num_speculative_tokens, device=start.device)
    row = (win.p_last - win.base)[:, None] + i
    last = (start[1:] - start[:-1])[:, None] - 1
    return start[:-1, None] + library(start).minimum(row, last)


def slots(
    position: Array,
    writes_kv: Array,
    req: Array,
    block_table: Array,
    block_size: int,
    max_model_len: int,
) -> Array:
    """[num_rows] int64 KV slot of each draft row, PAD_SLOT where it must not write.

    A block table's columns past a request's allocation hold stale ids, so a position at or
    beyond ``max_model_len`` is never looked up, and block 0 (vLLM's null block) is never written.

    Args:
        block_table: [num_reqs, max_blocks] physical block ids.
        block_size: tokens a block.
    """
    where = library(position).where
    writes_kv = writes_kv & (position < max_model_len)
    column = where(writes_kv, position, 0) // block_size
    block = block_table[req, column]
    # Widened by the position, which is int64: int32 block ids times a block's size can overflow.
    slot = position + (block - position // block_size) * block_size
    return where(writes_kv & (block > 0), slot, PAD_SLOT)
