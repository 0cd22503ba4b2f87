"""``expand`` as one Triton launch.

Its programs are of three kinds: blocks of draft rows, blocks of requests, and the aux rows that staging gathers.
``expand_torch`` says what each of them computes.
"""

import math

import torch
import triton
import triton.language as tl

from peagle_kernels.batch import DraftBuffers, DraftStep, KVGroups, Layout, TargetBatch
from peagle_kernels.geometry import MASK_ROW, PAD_ROW, PAD_SLOT

ROWS_PER_PROGRAM = 128
REQS_PER_PROGRAM = 32
COLUMNS_PER_STEP = 1024


def expand_triton(
    target: TargetBatch,
    aux: tuple[torch.Tensor, ...],
    groups: KVGroups,
    layout: Layout,
    step: DraftStep,
    out: DraftBuffers,
) -> None:
    """One launch of ``_expand_kernel``; same meaning as ``expand_torch``."""
    row_programs = triton.cdiv(layout.num_rows, ROWS_PER_PROGRAM)
    # One request more than there are: the last start of a static layout.
    req_programs = triton.cdiv(layout.num_reqs_padded + 1, REQS_PER_PROGRAM)
    draws = target.temperature is not None
    num_staging = (layout.num_staging_rows if layout.static_length else target.num_rows) if aux else 0
    aux_strides = tuple(hidden.stride(0) for hidden in aux)
    _expand_kernel[(row_programs + req_programs + num_staging * len(aux),)](
        target.input_ids,
        target.positions,
        target.query_start_loc,
        target.num_rejected,
        target.num_sampled,
        target.idx_mapping,
        target.last_sampled,
        target.next_prefill_tokens,
        groups.block_tables,
        tuple(table.stride(0) for table in groups.block_tables),
        groups.block_sizes,
        aux,
        aux_strides,
        out.query_start_loc,
        out.input_ids,
        out.positions,
        out.row_map,
        out.slot_mappings,
        out.slot_mappings.stride(0),
        out.seq_lens,
        out.sample_indices,
        out.sample_positions,
        out.sample_req,
        out.staging,
        out.staging.stride(0),
        # Any pointers will do where nothing draws: the kernel leaves them alone.
        target.temperature if draws else out.temperature,
        target.seeds if draws else out.seeds,
        out.temperature,
        out.seeds,
        target.num_reqs,
        layout.num_reqs_padded,
        layout.num_rows,
        row_programs,
        req_programs,
        layout.static_length,
        layout.staging_length,
        step.num_speculative_tokens,
        layout.samples_per_req(step.num_speculative_tokens),
        step.max_model_len,
        step.mask_token_id,
        max(layout.num_reqs_padded - 1, 0).bit_length(),
        IS_STATIC=layout.static_length > 0,
        DRAWS=draws,
        NUM_GROUPS=len(groups.block_tables),
        AUX_WIDTHS=tuple(hidden.shape[1] for hidden in aux),
        MASK_ROW=MASK_ROW,
        PAD_ROW=PAD_ROW,
        PAD_SLOT=PAD_SLOT,
        ROWS=ROWS_PER_PROGRAM,
        REQS=REQS_PER_PROGRAM,
        COLUMNS=COLUMNS_PER_STEP,
        VECTOR=vector_elements(out.staging.stride(0), *aux_strides),
    )


def vector_elements(*strides: int) -> int:
    """Elements that a row is a multiple of, up to 8: one access of 128 bits in 16-bit types.

    Triton sees by itself only that a stride divides by 16, and copies any other row an element at a time.
    """
    return math.gcd(8, *strides)


@triton.jit
def _window(
    req,
    live,
    positions_ptr,
    query_start_loc_ptr,
    num_rejected_ptr,
    draft_start_loc_ptr,
    static_length,
    num_speculative_tokens,
    max_model_len,
    IS_STATIC: tl.constexpr,
):
    """``geometry.window`` for a block of requests; ``live`` masks the loads."""
    start = tl.load(query_start_loc_ptr + req, mask=live, other=0)
    end = tl.load(query_start_loc_ptr + req + 1, mask=live, other=1)
    rejected = tl.load(num_rejected_ptr + req, mask=live, other=0)
    if IS_STATIC:
        draft_start = req * static_length
        length = tl.zeros_like(req) + static_length
    else:
        draft_start = tl.load(draft_start_loc_ptr + req, mask=live, other=0)
        length = tl.load(draft_start_loc_ptr + req + 1, mask=live, other=1) - draft_start
    p0 = tl.load(positions_ptr + start, mask=live, other=0)
    num_valid = end - start - rejected
    p_last = p0 + num_valid - 1
    window_end = tl.minimum(p_last + tl.maximum(num_speculative_tokens, 1), max_model_len)
    seq_len = tl.maximum(length, window_end)
    return start, draft_start, length, p0, p_last, seq_len, seq_len - length


@triton.jit
def _fill_rows(
    block,
    target_ids_ptr,
    target_positions_ptr,
    query_start_loc_ptr,
    num_rejected_ptr,
    num_sampled_ptr,
    idx_mapping_ptr,
    last_sampled_ptr,
    next_prefill_ptr,
    block_tables,
    block_table_strides,
    block_sizes,
    draft_start_loc_ptr,
    out_ids_ptr,
    out_positions_ptr,
    out_row_map_ptr,
    out_slots_ptr,
    out_slots_stride,
    num_reqs,
    num_reqs_padded,
    num_rows,
    static_length,
    staging_length,
    num_speculative_tokens,
    max_model_len,
    mask_token_id,
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
            below = tl.load(draft_start_loc_ptr + middle) <= row
            req = tl.where(below, middle, req)
            high = tl.where(below, high, middle - 1)
    live = in_range & (req < num_reqs)
    start, draft_start, length, p0, p_last, _seq_len, base = _window(
        req,
        live,
        target_positions_ptr,
        query_start_loc_ptr,
        num_rejected_ptr,
        draft_start_loc_ptr,
        static_length,
        num_speculative_tokens,
        max_model_len,
        IS_STATIC,
    )
    live = live & (row - draft_start < length)
    position = base + row - draft_start
    offset = position - p0
    is_valid = live & (offset >= 0) & (position <= p_last)
    is_mask = live & (position > p_last) & (position < p_last + tl.maximum(num_speculative_tokens, 1))

    idx = tl.load(idx_mapping_ptr + req, mask=live, other=-1)
    is_bonus = is_valid & (position == p_last)
    sampled = tl.load(num_sampled_ptr + req, mask=is_bonus, other=0) > 0
    state = tl.maximum(idx, 0)
    bonus = tl.load(last_sampled_ptr + state, mask=is_bonus & sampled, other=0).to(tl.int32)
    prefill = tl.load(next_prefill_ptr + state, mask=is_bonus & ~sampled, other=0).to(tl.int32)
    shifted = tl.load(target_ids_ptr + start + offset + 1, mask=is_valid & ~is_bonus, other=0).to(tl.int32)
    token = tl.where(is_mask, mask_token_id, bonus + prefill + shifted)
    tl.store(out_ids_ptr + row, token, mask=in_range)
    tl.store(out_positions_ptr + row, tl.where(live, position, 0), mask=in_range)

    staging_start = req * staging_length if IS_STATIC else start
    source = tl.where(is_valid, staging_start + offset, tl.where(is_mask, MASK_ROW, PAD_ROW))
    tl.store(out_row_map_ptr + row, source.to(tl.int32), mask=in_range)

    writes_kv = (is_valid | is_mask) & (position < max_model_len) & (idx >= 0)
    for group in tl.static_range(NUM_GROUPS):
        block_size = block_sizes[group]
        entry = block_tables[group] + req.to(tl.int64) * block_table_strides[group] + position // block_size
        kv_block = tl.load(entry, mask=writes_kv, other=0).to(tl.int64)
        slot = tl.where(writes_kv & (kv_block > 0), kv_block * block_size + position % block_size, PAD_SLOT)
        tl.store(out_slots_ptr + group * out_slots_stride + row, slot, mask=in_range)


@triton.jit
def _fill_requests(
    block,
    target_positions_ptr,
    query_start_loc_ptr,
    num_rejected_ptr,
    idx_mapping_ptr,
    draft_start_loc_ptr,
    temperature_ptr,
    seeds_ptr,
    out_seq_lens_ptr,
    out_sample_indices_ptr,
    out_sample_positions_ptr,
    out_sample_req_ptr,
    out_temperature_ptr,
    out_seeds_ptr,
    num_reqs,
    num_reqs_padded,
    static_length,
    num_speculative_tokens,
    samples_per_req,
    max_model_len,
    IS_STATIC: tl.constexpr,
    DRAWS: tl.constexpr,
    REQS: tl.constexpr,
):
    """A block of requests: sequence lengths, what to sample, and what to draw it with."""
    req = block * REQS + tl.arange(0, REQS)
    in_range = req < num_reqs_padded
    live = req < num_reqs
    _start, draft_start, length, _p0, p_last, seq_len, base = _window(
        req,
        live,
        target_positions_ptr,
        query_start_loc_ptr,
        num_rejected_ptr,
        draft_start_loc_ptr,
        static_length,
        num_speculative_tokens,
        max_model_len,
        IS_STATIC,
    )
    tl.store(out_seq_lens_ptr + req, tl.where(live, seq_len, 0).to(tl.int32), mask=in_range)
    if IS_STATIC:
        # A padding request has no rows of its own: it starts where the last real one ends.
        tl.store(draft_start_loc_ptr + req, tl.minimum(req, num_reqs) * static_length, mask=req <= num_reqs_padded)
    idx = tl.load(idx_mapping_ptr + req, mask=live, other=-1).to(tl.int64)
    for i in range(samples_per_req):
        sample = req * samples_per_req + i
        drafts = live & (i < num_speculative_tokens)
        index = draft_start + tl.minimum(p_last + i - base, length - 1)
        tl.store(out_sample_indices_ptr + sample, tl.where(drafts, index, 0).to(tl.int64), mask=in_range)
        tl.store(out_sample_positions_ptr + sample, tl.where(drafts, p_last + 1 + i, 0), mask=in_range)
        tl.store(out_sample_req_ptr + sample, tl.where(drafts, idx, -1), mask=in_range)
    if DRAWS:
        mine = live & (idx >= 0)
        tl.store(out_temperature_ptr + idx, tl.load(temperature_ptr + idx, mask=mine), mask=mine)
        tl.store(out_seeds_ptr + idx, tl.load(seeds_ptr + idx, mask=mine), mask=mine)


@triton.jit
def _stage(
    program,
    query_start_loc_ptr,
    num_rejected_ptr,
    aux,
    aux_strides,
    staging_ptr,
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
        start = tl.load(query_start_loc_ptr + req, mask=live, other=0)
        end = tl.load(query_start_loc_ptr + req + 1, mask=live, other=0)
        rejected = tl.load(num_rejected_ptr + req, mask=live, other=0)
        j = staging_row - req * staging_length
        is_valid = j < end - start - rejected
        source_row = start + j
    first_column = 0
    for part in tl.static_range(len(AUX_WIDTHS)):
        width = AUX_WIDTHS[part]
        if chosen_part == part:
            source = aux[part] + tl.multiple_of(tl.cast(source_row, tl.int64) * aux_strides[part], VECTOR)
            target = staging_ptr + tl.multiple_of(tl.cast(staging_row, tl.int64) * staging_stride, VECTOR)
            target += first_column
            for column_start in range(0, width, COLUMNS):
                column = column_start + tl.arange(0, COLUMNS)
                values = tl.load(source + column, mask=(column < width) & is_valid, other=0.0)
                tl.store(target + column, values, mask=column < width)
        first_column += width


# Nothing that changes from step to step may be specialised: a new variant would compile while requests wait.
@triton.jit(
    do_not_specialize=[
        "num_reqs",
        "num_reqs_padded",
        "num_rows",
        "row_programs",
        "req_programs",
        "static_length",
        "staging_length",
        "num_speculative_tokens",
        "samples_per_req",
        "max_model_len",
        "search_steps",
    ]
)
def _expand_kernel(
    target_ids_ptr,  # [num_target_rows]
    target_positions_ptr,  # [num_target_rows]
    query_start_loc_ptr,  # [num_reqs + 1]
    num_rejected_ptr,  # [num_reqs]
    num_sampled_ptr,  # [num_reqs]
    idx_mapping_ptr,  # [num_reqs]
    last_sampled_ptr,  # [max_num_reqs]
    next_prefill_ptr,  # [max_num_reqs]
    block_tables,  # NUM_GROUPS x [num_reqs, max_blocks]
    block_table_strides,
    block_sizes,
    aux,  # len(AUX_WIDTHS) x [num_target_rows, width]
    aux_strides,
    draft_start_loc_ptr,  # [num_reqs_padded + 1], written where the layout is static
    out_ids_ptr,  # [num_rows]
    out_positions_ptr,  # [num_rows]
    out_row_map_ptr,  # [num_rows]
    out_slots_ptr,  # [NUM_GROUPS, num_rows]
    out_slots_stride,
    out_seq_lens_ptr,  # [num_reqs_padded]
    out_sample_indices_ptr,  # [num_reqs_padded * K]
    out_sample_positions_ptr,
    out_sample_req_ptr,
    staging_ptr,  # [num_staging_rows, sum of AUX_WIDTHS]
    staging_stride,
    temperature_ptr,  # [max_num_reqs]
    seeds_ptr,  # [max_num_reqs]
    out_temperature_ptr,  # [max_num_reqs]
    out_seeds_ptr,  # [max_num_reqs]
    num_reqs,
    num_reqs_padded,
    num_rows,
    row_programs,
    req_programs,
    static_length,
    staging_length,
    num_speculative_tokens,
    samples_per_req,
    max_model_len,
    mask_token_id,
    search_steps,
    IS_STATIC: tl.constexpr,
    DRAWS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    AUX_WIDTHS: tl.constexpr,
    MASK_ROW: tl.constexpr,
    PAD_ROW: tl.constexpr,
    PAD_SLOT: tl.constexpr,
    ROWS: tl.constexpr,
    REQS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid < row_programs:
        _fill_rows(
            pid,
            target_ids_ptr,
            target_positions_ptr,
            query_start_loc_ptr,
            num_rejected_ptr,
            num_sampled_ptr,
            idx_mapping_ptr,
            last_sampled_ptr,
            next_prefill_ptr,
            block_tables,
            block_table_strides,
            block_sizes,
            draft_start_loc_ptr,
            out_ids_ptr,
            out_positions_ptr,
            out_row_map_ptr,
            out_slots_ptr,
            out_slots_stride,
            num_reqs,
            num_reqs_padded,
            num_rows,
            static_length,
            staging_length,
            num_speculative_tokens,
            max_model_len,
            mask_token_id,
            search_steps,
            IS_STATIC,
            NUM_GROUPS,
            MASK_ROW,
            PAD_ROW,
            PAD_SLOT,
            ROWS,
        )
    elif pid < row_programs + req_programs:
        _fill_requests(
            pid - row_programs,
            target_positions_ptr,
            query_start_loc_ptr,
            num_rejected_ptr,
            idx_mapping_ptr,
            draft_start_loc_ptr,
            temperature_ptr,
            seeds_ptr,
            out_seq_lens_ptr,
            out_sample_indices_ptr,
            out_sample_positions_ptr,
            out_sample_req_ptr,
            out_temperature_ptr,
            out_seeds_ptr,
            num_reqs,
            num_reqs_padded,
            static_length,
            num_speculative_tokens,
            samples_per_req,
            max_model_len,
            IS_STATIC,
            DRAWS,
            REQS,
        )
    else:
        if len(AUX_WIDTHS) > 0:
            _stage(
                pid - row_programs - req_programs,
                query_start_loc_ptr,
                num_rejected_ptr,
                aux,
                aux_strides,
                staging_ptr,
                staging_stride,
                num_reqs,
                staging_length,
                IS_STATIC,
                AUX_WIDTHS,
                COLUMNS,
                VECTOR,
            )


# Under TRITON_INTERPRET=1 the decorator makes something else of a kernel; then CPU tensors can be launched on.
INTERPRETED = not isinstance(_expand_kernel, triton.runtime.JITFunction)
