"""expand: one launch from the target's batch to the drafter's batch.

``expand_torch`` is the meaning (by ``geometry``) and the CPU path; ``_expand_kernel`` computes the
same in one Triton launch. Its programs are of three kinds: blocks of draft rows, blocks of
requests, and the aux rows that staging gathers.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from peagle_kernels import geometry
from peagle_kernels.batch import DraftBuffers, KVGroups, TargetBatch
from peagle_kernels.geometry import MASK_ROW, PAD_ROW, PAD_SLOT

ROWS_PER_PROGRAM = 128
REQS_PER_PROGRAM = 32
COLUMNS_PER_STEP = 1024


@dataclass(frozen=True)
class Layout:
    """How many draft rows each request gets; ``DraftBuffers.query_start_loc`` holds the starts.

    Static (``static_length`` > 0): every request gets ``static_length`` rows, and staging is compact,
    ``staging_length`` rows a request. Ragged (0): staging row i is target row i.
    """

    num_rows: int  # draft rows to fill, those of padding requests and beyond included
    num_reqs_padded: int  # requests to fill; from num_reqs on they are padding
    static_length: int = 0
    staging_length: int = 0

    @property
    def num_staging_rows(self) -> int:
        return self.num_reqs_padded * self.staging_length


@dataclass(frozen=True)
class DraftStep:
    """What does not change with the batch."""

    num_speculative_tokens: int  # K of this step, 0 included
    max_model_len: int
    mask_token_id: int


def expand(
    target: TargetBatch,
    aux: tuple[torch.Tensor, ...],
    groups: KVGroups,
    layout: Layout,
    step: DraftStep,
    out: DraftBuffers,
) -> None:
    """Build the drafter's batch.

    Args:
        target: the finished target step.
        aux: captured hidden states, each [>= num_target_rows, width]; empty when the caller
            stages them itself.
        groups: the draft layers' KV cache groups, one slot mapping each.
        layout: rows a request; ``out.query_start_loc`` must hold the starts already.
        out: filled up to ``layout.num_rows`` rows, ``layout.num_reqs_padded`` requests and
            ``num_reqs_padded * K`` samples. Every one of those elements is written.
    """
    if out.input_ids.is_cuda or _interpreted():
        expand_triton(target, aux, groups, layout, step, out)
    else:
        expand_torch(target, aux, groups, layout, step, out)


def _interpreted() -> bool:
    return not isinstance(_expand_kernel, triton.runtime.JITFunction)


def expand_torch(
    target: TargetBatch,
    aux: tuple[torch.Tensor, ...],
    groups: KVGroups,
    layout: Layout,
    step: DraftStep,
    out: DraftBuffers,
) -> None:
    """The meaning of ``expand`` in plain torch, and its CPU path. No loop over rows or requests."""
    num_reqs, num_k = target.num_reqs, step.num_speculative_tokens
    start = out.query_start_loc[: num_reqs + 1]
    query_start_loc = target.query_start_loc[: num_reqs + 1]
    idx = target.idx_mapping[:num_reqs].long()

    win = geometry.window(
        query_start_loc, target.positions, target.num_rejected[:num_reqs], start, num_k, step.max_model_len
    )
    rows = geometry.rows(win, start, num_k)
    num_real, num_rows = len(rows.req), layout.num_rows

    first_row = query_start_loc[:-1].long()
    sampled = target.num_sampled[:num_reqs] > 0
    state = idx.clamp(min=0)
    bonus = torch.where(sampled, target.last_sampled[state], target.next_prefill_tokens[state])
    next_row = (first_row[rows.req] + rows.offset + 1).clamp(0, target.num_rows - 1)
    token = torch.where(rows.position == win.p_last[rows.req], bonus[rows.req], target.input_ids[next_row])
    token = torch.where(rows.is_valid, token, torch.where(rows.is_mask, step.mask_token_id, 0))
    out.input_ids[:num_real] = token
    out.positions[:num_real] = rows.position

    staging_start = torch.arange(num_reqs, device=idx.device) * layout.staging_length
    staging_row = (staging_start if layout.static_length else first_row)[rows.req] + rows.offset
    out.row_map[:num_real] = torch.where(rows.is_valid, staging_row, torch.where(rows.is_mask, MASK_ROW, PAD_ROW))

    writes_kv = (rows.is_valid | rows.is_mask) & (idx >= 0)[rows.req]
    for group, (table, size) in enumerate(zip(groups.block_tables, groups.block_sizes, strict=True)):
        out.slot_mappings[group, :num_real] = geometry.slots(
            rows.position, writes_kv, rows.req, table, size, step.max_model_len
        )

    out.seq_lens[:num_reqs] = win.seq_len
    samples = slice(0, num_reqs * num_k)
    out.sample_indices[samples] = geometry.sample_rows(win, start, num_k).flatten()
    # The row at position P yields the token at P + 2; a draw is keyed by the position before it.
    offsets = torch.arange(num_k, device=idx.device)
    out.sample_positions[samples] = (win.p_last[:, None] + 1 + offsets).flatten()
    out.sample_req[samples] = idx[:, None].expand(-1, num_k).flatten()

    _fill_padding(groups, layout, num_k, num_reqs, num_real, num_rows, out)
    if aux:
        _stage_torch(target, aux, win, layout, out)


def _fill_padding(
    groups: KVGroups, layout: Layout, num_k: int, num_reqs: int, num_real: int, num_rows: int, out: DraftBuffers
) -> None:
    """Rows, requests and samples past the real ones: they compute, and touch nothing."""
    if num_rows > num_real:
        out.input_ids[num_real:num_rows] = 0
        out.positions[num_real:num_rows] = 0
        out.row_map[num_real:num_rows] = PAD_ROW
        out.slot_mappings[: len(groups.block_tables), num_real:num_rows] = PAD_SLOT
    if layout.num_reqs_padded > num_reqs:
        out.seq_lens[num_reqs : layout.num_reqs_padded] = 0
        padding = slice(num_reqs * num_k, layout.num_reqs_padded * num_k)
        out.sample_indices[padding] = 0
        out.sample_positions[padding] = 0
        out.sample_req[padding] = -1


def _stage_torch(
    target: TargetBatch, aux: tuple[torch.Tensor, ...], win: geometry.Window, layout: Layout, out: DraftBuffers
) -> None:
    """Captured hidden states side by side; compact staging holds zeros where nothing is valid."""
    if not layout.static_length:
        torch.cat([hidden[: target.num_rows] for hidden in aux], dim=-1, out=out.staging[: target.num_rows])
        return
    num_reqs, length = target.num_reqs, layout.staging_length
    j = torch.arange(length, device=win.p0.device)
    source = target.query_start_loc[:num_reqs, None].long() + j
    valid = j < win.num_valid[:, None]
    gathered = torch.cat([hidden[source.clamp(max=target.num_rows - 1).flatten()] for hidden in aux], dim=-1)
    real = num_reqs * length
    out.staging[:real] = torch.where(valid.flatten()[:, None], gathered, 0)
    out.staging[real : layout.num_staging_rows] = 0


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
    req_programs = triton.cdiv(layout.num_reqs_padded, REQS_PER_PROGRAM)
    num_staging = (layout.num_staging_rows if layout.static_length else target.num_rows) if aux else 0
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
        tuple(hidden.stride(0) for hidden in aux),
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
        target.num_reqs,
        layout.num_reqs_padded,
        layout.num_rows,
        row_programs,
        req_programs,
        layout.static_length,
        layout.staging_length,
        step.num_speculative_tokens,
        step.max_model_len,
        step.mask_token_id,
        max(layout.num_reqs_padded - 1, 0).bit_length(),
        IS_STATIC=layout.static_length > 0,
        NUM_GROUPS=len(groups.block_tables),
        AUX_WIDTHS=tuple(hidden.shape[1] for hidden in aux),
        MASK_ROW=MASK_ROW,
        PAD_ROW=PAD_ROW,
        PAD_SLOT=PAD_SLOT,
        ROWS=ROWS_PER_PROGRAM,
        REQS=REQS_PER_PROGRAM,
        COLUMNS=COLUMNS_PER_STEP,
    )


@triton.jit
def _window(
    req,
    live,
    positions_ptr,
    query_start_loc_ptr,
    num_rejected_ptr,
    draft_start_loc_ptr,
    num_speculative_tokens,
    max_model_len,
):
    """``geometry.window`` for a block of requests; ``live`` masks the loads."""
    start = tl.load(query_start_loc_ptr + req, mask=live, other=0)
    end = tl.load(query_start_loc_ptr + req + 1, mask=live, other=1)
    rejected = tl.load(num_rejected_ptr + req, mask=live, other=0)
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
        num_speculative_tokens,
        max_model_len,
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
    out_seq_lens_ptr,
    out_sample_indices_ptr,
    out_sample_positions_ptr,
    out_sample_req_ptr,
    num_reqs,
    num_reqs_padded,
    num_speculative_tokens,
    max_model_len,
    REQS: tl.constexpr,
):
    """A block of requests: sequence lengths and what to sample."""
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
        num_speculative_tokens,
        max_model_len,
    )
    tl.store(out_seq_lens_ptr + req, tl.where(live, seq_len, 0).to(tl.int32), mask=in_range)
    idx = tl.load(idx_mapping_ptr + req, mask=live, other=-1).to(tl.int64)
    for i in range(num_speculative_tokens):
        sample = req * num_speculative_tokens + i
        index = draft_start + tl.minimum(p_last + i - base, length - 1)
        tl.store(out_sample_indices_ptr + sample, tl.where(live, index, 0).to(tl.int64), mask=in_range)
        tl.store(out_sample_positions_ptr + sample, tl.where(live, p_last + 1 + i, 0), mask=in_range)
        tl.store(out_sample_req_ptr + sample, idx, mask=in_range)


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
            source = aux[part] + tl.cast(source_row, tl.int64) * aux_strides[part]
            target = staging_ptr + tl.cast(staging_row, tl.int64) * staging_stride + first_column
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
    draft_start_loc_ptr,  # [num_reqs_padded + 1]
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
    num_reqs,
    num_reqs_padded,
    num_rows,
    row_programs,
    req_programs,
    static_length,
    staging_length,
    num_speculative_tokens,
    max_model_len,
    mask_token_id,
    search_steps,
    IS_STATIC: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    AUX_WIDTHS: tl.constexpr,
    MASK_ROW: tl.constexpr,
    PAD_ROW: tl.constexpr,
    PAD_SLOT: tl.constexpr,
    ROWS: tl.constexpr,
    REQS: tl.constexpr,
    COLUMNS: tl.constexpr,
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
            out_seq_lens_ptr,
            out_sample_indices_ptr,
            out_sample_positions_ptr,
            out_sample_req_ptr,
            num_reqs,
            num_reqs_padded,
            num_speculative_tokens,
            max_model_len,
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
            )
