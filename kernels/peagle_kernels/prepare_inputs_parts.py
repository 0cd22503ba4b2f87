"""What each program of ``_prepare_inputs_kernel`` computes: a block of draft rows, of requests, or a staging row.

``target`` and ``out`` are the tensors of ``TargetBatch`` and ``DraftBuffers``, pointers here.
"""

import triton
import triton.language as tl


@triton.jit
def window(
    req,
    live,
    target,
    out,
    static_length,
    num_speculative_tokens,
    max_model_len,
    IS_STATIC: tl.constexpr,
):
    """``geometry.window`` for a block of requests; ``live`` masks the loads."""
    start = tl.load(target.query_start_loc + req, mask=live, other=0)
    end = tl.load(target.query_start_loc + req + 1, mask=live, other=1)
    rejected = tl.load(target.num_rejected + req, mask=live, other=0)
    if IS_STATIC:
        draft_start = req * static_length
        length = tl.zeros_like(req) + static_length
    else:
        draft_start = tl.load(out.query_start_loc + req, mask=live, other=0)
        length = tl.load(out.query_start_loc + req + 1, mask=live, other=1) - draft_start
    p0 = tl.load(target.positions + start, mask=live, other=0)
    num_valid = end - start - rejected
    p_last = p0 + num_valid - 1
    window_end = tl.minimum(p_last + tl.maximum(num_speculative_tokens, 1), max_model_len)
    seq_len = tl.maximum(length, window_end)
    return start, draft_start, length, p0, p_last, seq_len, seq_len - length


@triton.jit
def fill_rows(
    block,
    target,
    out,
    block_tables,
    block_table_strides,
    block_sizes,
    slots_stride,
    num_reqs,
    num_reqs_padded,
    num_rows,
    static_length,
    staging_length,
    num_speculative_tokens,
    max_model_len,
    parallel_drafting_token_id,
    search_steps,
    IS_STATIC: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    MASK_ROW: tl.constexpr,
    PAD_ROW: tl.constexpr,
    PAD_SLOT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A block of draft rows: tokens, positions, row map and slots."""
    row = block * ROWS + tl.arange(0, ROWS)
    in_range = row < num_rows
    if IS_STATIC:
        req = row // static_length
    else:
        # The last request that starts at or before this row.
        req = tl.zeros([ROWS], dtype=tl.int32)
        high = tl.zeros([ROWS], dtype=tl.int32) + num_reqs_padded - 1
        for _ in range(search_steps):
            middle = (req + high + 1) // 2
            below = tl.load(out.query_start_loc + middle) <= row
            req = tl.where(below, middle, req)
            high = tl.where(below, high, middle - 1)
    live = in_range & (req < num_reqs)
    start, draft_start, length, p0, p_last, _seq_len, base = window(
        req, live, target, out, static_length, num_speculative_tokens, max_model_len, IS_STATIC
    )
    live = live & (row - draft_start < length)
    position = base + row - draft_start
    offset = position - p0
    is_valid = live & (offset >= 0) & (position <= p_last)
    is_mask = live & (position > p_last) & (position < p_last + tl.maximum(num_speculative_tokens, 1))

    idx = tl.load(target.idx_mapping + req, mask=live, other=-1)
    is_bonus = is_valid & (position == p_last)
    sampled = tl.load(target.num_sampled + req, mask=is_bonus, other=0) > 0
    state = tl.maximum(idx, 0)
    bonus = tl.load(target.last_sampled + state, mask=is_bonus & sampled, other=0).to(tl.int32)
    prefill = tl.load(target.next_prefill_tokens + state, mask=is_bonus & ~sampled, other=0).to(tl.int32)
    shifted = tl.load(target.input_ids + start + offset + 1, mask=is_valid & ~is_bonus, other=0).to(tl.int32)
    token = tl.where(is_mask, parallel_drafting_token_id, bonus + prefill + shifted)
    tl.store(out.input_ids + row, token, mask=in_range)
    tl.store(out.positions + row, tl.where(live, position, 0), mask=in_range)

    staging_start = req * staging_length if IS_STATIC else start
    source = tl.where(is_valid, staging_start + offset, tl.where(is_mask, MASK_ROW, PAD_ROW))
    tl.store(out.row_map + row, source.to(tl.int32), mask=in_range)

    writes_kv = (is_valid | is_mask) & (position < max_model_len) & (idx >= 0)
    for group in tl.static_range(NUM_GROUPS):
        block_size = block_sizes[group]
        entry = block_tables[group] + req.to(tl.int64) * block_table_strides[group] + position // block_size
        kv_block = tl.load(entry, mask=writes_kv, other=0).to(tl.int64)
        slot = tl.where(writes_kv & (kv_block > 0), kv_block * block_size + position % block_size, PAD_SLOT)
        tl.store(out.slot_mappings + group * slots_stride + row, slot, mask=in_range)


@triton.jit
def fill_requests(
    block,
    target,
    out,
    num_reqs,
    num_reqs_padded,
    static_length,
    num_speculative_tokens,
    samples_per_req,
    max_model_len,
    IS_STATIC: tl.constexpr,
    REQS: tl.constexpr,
):
    """A block of requests: sequence lengths, what to sample, and what to draw it with."""
    req = block * REQS + tl.arange(0, REQS)
    in_range = req < num_reqs_padded
    live = req < num_reqs
    _start, draft_start, length, _p0, p_last, seq_len, base = window(
        req, live, target, out, static_length, num_speculative_tokens, max_model_len, IS_STATIC
    )
    tl.store(out.seq_lens + req, tl.where(live, seq_len, 0).to(tl.int32), mask=in_range)
    if IS_STATIC:
        # A padding request has no rows of its own: it starts where the last real one ends.
        tl.store(out.query_start_loc + req, tl.minimum(req, num_reqs) * static_length, mask=req <= num_reqs_padded)
    idx = tl.load(target.idx_mapping + req, mask=live, other=-1).to(tl.int64)
    for i in range(samples_per_req):
        sample = req * samples_per_req + i
        drafts = live & (i < num_speculative_tokens)
        index = draft_start + tl.minimum(p_last + i - base, length - 1)
        tl.store(out.sample_indices + sample, tl.where(drafts, index, 0).to(tl.int64), mask=in_range)
        tl.store(out.sample_pos + sample, tl.where(drafts, p_last + 1 + i, 0), mask=in_range)
        tl.store(out.sample_idx_mapping + sample, tl.where(drafts, idx, -1), mask=in_range)
    mine = live & (idx >= 0)
    tl.store(out.temperature + idx, tl.load(target.temperature + idx, mask=mine), mask=mine)
    tl.store(out.seeds + idx, tl.load(target.seeds + idx, mask=mine), mask=mine)
    tl.store(out.top_k + idx, tl.load(target.top_k + idx, mask=mine), mask=mine)
    tl.store(out.top_p + idx, tl.load(target.top_p + idx, mask=mine), mask=mine)


@triton.jit
def stage(
    program,
    target,
    out,
    aux,
    aux_strides,
    staging_stride,
    num_reqs,
    staging_length,
    IS_STATIC: tl.constexpr,
    AUX_WIDTHS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One aux row of one staging row, which holds those of a target row side by side."""
    staging_row = program // len(AUX_WIDTHS)
    chosen_part = program % len(AUX_WIDTHS)
    source_row = staging_row
    is_valid = True
    if IS_STATIC:
        req = staging_row // staging_length
        live = req < num_reqs
        start = tl.load(target.query_start_loc + req, mask=live, other=0)
        end = tl.load(target.query_start_loc + req + 1, mask=live, other=0)
        rejected = tl.load(target.num_rejected + req, mask=live, other=0)
        j = staging_row - req * staging_length
        is_valid = j < end - start - rejected
        source_row = start + j
    first_column = 0
    for part in tl.static_range(len(AUX_WIDTHS)):
        width = AUX_WIDTHS[part]
        if chosen_part == part:
            source = aux[part] + tl.multiple_of(tl.cast(source_row, tl.int64) * aux_strides[part], VECTOR)
            staged = out.staging + tl.multiple_of(tl.cast(staging_row, tl.int64) * staging_stride, VECTOR)
            staged += first_column
            for column_start in range(0, width, COLUMNS):
                column = column_start + tl.arange(0, COLUMNS)
                values = tl.load(source + column, mask=(column < width) & is_valid, other=0.0)
                tl.store(staged + column, values, mask=column < width)
        first_column += width
