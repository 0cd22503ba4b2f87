"""prepare_inputs: one launch from the target's batch to the drafter's batch.

Read ``prepare_inputs_torch``: the reference, written with ``geometry``, and what a CPU runs. ``prepare_inputs``
computes the same in one launch, whose programs are of three kinds: blocks of draft rows, blocks of requests, and the
aux rows that staging gathers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle_kernels import geometry
from peagle_kernels.batch import DraftBuffers, KVGroups, TargetBatch
from peagle_kernels.dispatch import runs_twin, vector_elements
from peagle_kernels.layout import DraftBatch

MASK_ROW = tl.constexpr(geometry.MASK_ROW)
PAD_ROW = tl.constexpr(geometry.PAD_ROW)
PAD_SLOT = tl.constexpr(geometry.PAD_SLOT)
ROWS_PER_PROGRAM = tl.constexpr(128)
REQS_PER_PROGRAM = tl.constexpr(32)
COLUMNS_PER_STEP = tl.constexpr(1024)


class _Sizes(NamedTuple):
    """Numbers that can change from step to step."""

    num_reqs: int
    num_reqs_padded: int
    num_rows: int
    static_length: int
    staging_length: int
    num_speculative_tokens: int
    max_model_len: int
    parallel_drafting_token_id: int
    search_steps: int
    slots_stride: int
    staging_stride: int


def prepare_inputs(
    target: TargetBatch,
    aux: tuple[Tensor, ...],
    groups: KVGroups,
    batch: DraftBatch,
    out: DraftBuffers,
    *,
    max_model_len: int,
    parallel_drafting_token_id: int,
) -> None:
    """Build the drafter's batch.

    Args:
        target: the finished target step.
        aux: captured hidden states, each [>= num_target_rows, width]; empty when the caller
            stages them itself.
        groups: the draft layers' KV cache groups, one slot mapping each.
        batch: where it is ragged, ``out.query_start_loc`` must hold the starts already.
        out: filled up to ``batch.num_rows`` rows, ``batch.num_reqs_padded`` requests and their samples; every one
            of those elements is written. Temperatures, seeds and limits are written for the batch's own requests.
    """
    if runs_twin(out.input_ids):
        return prepare_inputs_torch(target, aux, groups, batch, out, max_model_len, parallel_drafting_token_id)
    aux_strides = tuple(hidden.stride(0) for hidden in aux)
    layout = batch.num_reqs, batch.num_reqs_padded, batch.num_rows, batch.static_length, batch.staging_length
    numbers = batch.num_speculative_tokens, max_model_len, parallel_drafting_token_id
    search_steps = max(batch.num_reqs_padded - 1, 0).bit_length()
    strides = out.slot_mappings.stride(0), out.staging.stride(0)
    sizes = _Sizes(*layout, *numbers, search_steps, *strides)
    row_programs = triton.cdiv(batch.num_rows, ROWS_PER_PROGRAM.value)
    req_programs = triton.cdiv(batch.num_reqs_padded + 1, REQS_PER_PROGRAM.value)
    _prepare_inputs_kernel[(row_programs + req_programs + batch.num_staging_rows * len(aux),)](
        target,
        out,
        groups,
        tuple(table.stride(0) for table in groups.block_tables),
        aux,
        aux_strides,
        *sizes,
        IS_STATIC=batch.static_length > 0,
        NUM_GROUPS=len(groups.block_tables),
        AUX_WIDTHS=tuple(hidden.shape[1] for hidden in aux),
        VECTOR=vector_elements(sizes.staging_stride, *aux_strides),
    )


def prepare_inputs_torch(
    target: TargetBatch,
    aux: tuple[Tensor, ...],
    groups: KVGroups,
    batch: DraftBatch,
    out: DraftBuffers,
    max_model_len: int,
    parallel_drafting_token_id: int,
) -> None:
    """The meaning of ``prepare_inputs`` in plain torch. No loop over rows or requests."""
    num_reqs, num_k = batch.num_reqs, batch.num_speculative_tokens
    if batch.static_length:
        # A padding request has no rows of its own: it starts where the last real one ends.
        request = torch.arange(batch.num_reqs_padded + 1, device=target.positions.device)
        out.query_start_loc[: batch.num_reqs_padded + 1] = request.clamp(max=num_reqs) * batch.static_length
    start = out.query_start_loc[: num_reqs + 1].long()
    query_start_loc = target.query_start_loc[: num_reqs + 1].long()
    idx = target.idx_mapping[:num_reqs]

    win = geometry.window(
        query_start_loc, target.positions, target.num_rejected[:num_reqs], start, num_k, max_model_len
    )
    rows = geometry.rows(win, start, num_k)
    num_real = len(rows.req)

    first_row = query_start_loc[:-1]
    state = idx.clamp(min=0)
    sampled = target.num_sampled[:num_reqs] > 0
    bonus = torch.where(sampled, target.last_sampled[state], target.next_prefill_tokens[state])
    staged_row = first_row[rows.req] + rows.offset  # row of the target's batch, meaningless outside the valid ones
    next_row = (staged_row + 1).clamp(0, batch.num_target_rows - 1)
    token = torch.where(rows.position == win.p_last[rows.req], bonus[rows.req], target.input_ids[next_row])
    token = torch.where(rows.is_valid, token, torch.where(rows.is_mask, parallel_drafting_token_id, 0))
    out.input_ids[:num_real] = token
    out.positions[:num_real] = rows.position

    if batch.static_length:
        staged_row = rows.req * batch.staging_length + rows.offset
    special = torch.where(rows.is_mask, geometry.MASK_ROW, geometry.PAD_ROW)
    out.row_map[:num_real] = torch.where(rows.is_valid, staged_row, special)

    writes_kv = (rows.is_valid | rows.is_mask) & (idx >= 0)[rows.req]
    for group, (table, size) in enumerate(zip(groups.block_tables, groups.block_sizes, strict=True)):
        out.slot_mappings[group, :num_real] = geometry.slots(
            rows.position, writes_kv, rows.req, table, size, max_model_len
        )

    out.seq_lens[:num_reqs] = win.seq_len
    _fill_samples(win, idx, start, batch, out)
    padding = slice(num_real, batch.num_rows)  # rows and requests past the real ones write no KV
    out.input_ids[padding] = out.positions[padding] = 0
    out.row_map[padding] = geometry.PAD_ROW
    out.slot_mappings[: len(groups.block_tables), padding] = geometry.PAD_SLOT
    out.seq_lens[num_reqs : batch.num_reqs_padded] = 0
    if target.temperature is not out.temperature:  # V1 samples by its own, and passes these
        mine = idx[idx >= 0]
        for name in ("temperature", "seeds", "top_k", "top_p"):
            getattr(out, name)[mine] = getattr(target, name)[mine]
    if aux:
        _stage(target, aux, win, batch, out)


def _fill_samples(win: geometry.Window, idx: Tensor, start: Tensor, batch: DraftBatch, out: DraftBuffers) -> None:
    """Which rows to sample. Unused samples, padding requests' among them, get row 0 and request -1."""
    num_reqs, num_k = batch.num_reqs, batch.num_speculative_tokens
    room = batch.samples_per_req
    indices, positions, req = (
        buffer[: batch.num_reqs_padded * room].reshape(batch.num_reqs_padded, room)
        for buffer in (out.sample_indices, out.sample_pos, out.sample_idx_mapping)
    )
    indices[...] = positions[...] = 0
    req[...] = -1
    indices[:num_reqs, :num_k] = geometry.sample_rows(win, start, num_k)
    # The row at position P yields the token at P + 2; a draw is keyed by the position before it.
    positions[:num_reqs, :num_k] = win.p_last[:, None] + torch.arange(1, num_k + 1, device=idx.device)
    req[:num_reqs, :num_k] = idx[:, None]


def _stage(
    target: TargetBatch, aux: tuple[Tensor, ...], win: geometry.Window, batch: DraftBatch, out: DraftBuffers
) -> None:
    """Captured hidden states side by side; compact staging holds zeros where nothing is valid."""
    if not batch.static_length:
        torch.cat([hidden[: batch.num_target_rows] for hidden in aux], dim=-1, out=out.staging[: batch.num_target_rows])
        return
    num_reqs, length = batch.num_reqs, batch.staging_length
    j = torch.arange(length, device=win.p0.device)
    source = target.query_start_loc[:num_reqs, None] + j
    valid = j < win.num_valid[:, None]
    gathered = torch.cat([hidden[source.clamp(max=batch.num_target_rows - 1).flatten()] for hidden in aux], dim=-1)
    real = num_reqs * length
    out.staging[:real] = torch.where(valid.flatten()[:, None], gathered, 0)
    out.staging[real : batch.num_staging_rows] = 0


# A variant for sizes of 1 or multiples of 16 would compile while requests wait. Each is an argument of its own, since
# Triton 3.6 specialises what is in a tuple, whatever ``do_not_specialize`` says.
@triton.jit(do_not_specialize=_Sizes._fields)
def _prepare_inputs_kernel(
    target,  # TargetBatch
    out,  # DraftBuffers
    groups,  # KVGroups
    block_table_strides,
    aux,  # len(AUX_WIDTHS) x [num_target_rows, width]
    aux_strides,
    num_reqs,
    num_reqs_padded,
    num_rows,
    static_length,
    staging_length,
    num_speculative_tokens,
    max_model_len,
    parallel_drafting_token_id,
    search_steps,
    slots_stride,
    staging_stride,
    IS_STATIC: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    AUX_WIDTHS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    sizes = _Sizes(
        num_reqs,
        num_reqs_padded,
        num_rows,
        static_length,
        staging_length,
        num_speculative_tokens,
        max_model_len,
        parallel_drafting_token_id,
        search_steps,
        slots_stride,
        staging_stride,
    )
    pid = tl.program_id(0)
    row_programs = tl.cdiv(num_rows, ROWS_PER_PROGRAM)
    # One request more than there are: the last start of a static layout.
    req_programs = tl.cdiv(num_reqs_padded + 1, REQS_PER_PROGRAM)
    if pid < row_programs:
        _fill_rows(pid, target, out, groups, block_table_strides, sizes, IS_STATIC, NUM_GROUPS)
    elif pid < row_programs + req_programs:
        _fill_requests(pid - row_programs, target, out, sizes, IS_STATIC)
    elif len(AUX_WIDTHS) > 0:
        program = pid - row_programs - req_programs
        _stage_row(program, target, out, aux, aux_strides, sizes, IS_STATIC, AUX_WIDTHS, VECTOR)


@triton.jit
def _window(req, live, target, out, sizes, IS_STATIC: tl.constexpr):
    """``geometry.window`` for a block of requests; ``live`` masks the loads."""
    start = tl.load(target.query_start_loc + req, mask=live, other=0)
    end = tl.load(target.query_start_loc + req + 1, mask=live, other=1)
    rejected = tl.load(target.num_rejected + req, mask=live, other=0)
    if IS_STATIC:
        draft_start = req * sizes.static_length
        length = tl.zeros_like(req) + sizes.static_length
    else:
        draft_start = tl.load(out.query_start_loc + req, mask=live, other=0)
        length = tl.load(out.query_start_loc + req + 1, mask=live, other=1) - draft_start
    p0 = tl.load(target.positions + start, mask=live, other=0)
    num_valid = end - start - rejected
    p_last = p0 + num_valid - 1
    window_end = tl.minimum(p_last + tl.maximum(sizes.num_speculative_tokens, 1), sizes.max_model_len)
    seq_len = tl.maximum(length, window_end)
    return start, draft_start, length, p0, p_last, seq_len, seq_len - length


@triton.jit
def _fill_rows(
    block, target, out, groups, block_table_strides, sizes, IS_STATIC: tl.constexpr, NUM_GROUPS: tl.constexpr
):
    """A block of draft rows: tokens, positions, row map and slots."""
    row = block * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM)
    in_range = row < sizes.num_rows
    if IS_STATIC:
        req = row // sizes.static_length
    else:
        # The last request that starts at or before this row.
        req = tl.zeros([ROWS_PER_PROGRAM], dtype=tl.int32)
        high = tl.zeros([ROWS_PER_PROGRAM], dtype=tl.int32) + sizes.num_reqs_padded - 1
        for _ in range(sizes.search_steps):
            middle = (req + high + 1) // 2
            below = tl.load(out.query_start_loc + middle) <= row
            req = tl.where(below, middle, req)
            high = tl.where(below, high, middle - 1)
    live = in_range & (req < sizes.num_reqs)
    start, draft_start, length, p0, p_last, _seq_len, base = _window(req, live, target, out, sizes, IS_STATIC)
    live = live & (row - draft_start < length)
    position = base + row - draft_start
    offset = position - p0
    is_valid = live & (offset >= 0) & (position <= p_last)
    is_mask = live & (position > p_last) & (position < p_last + tl.maximum(sizes.num_speculative_tokens, 1))

    idx = tl.load(target.idx_mapping + req, mask=live, other=-1)
    is_bonus = is_valid & (position == p_last)
    sampled = tl.load(target.num_sampled + req, mask=is_bonus, other=0) > 0
    state = tl.maximum(idx, 0)
    bonus = tl.load(target.last_sampled + state, mask=is_bonus & sampled, other=0).to(tl.int32)
    prefill = tl.load(target.next_prefill_tokens + state, mask=is_bonus & ~sampled, other=0).to(tl.int32)
    shifted = tl.load(target.input_ids + start + offset + 1, mask=is_valid & ~is_bonus, other=0).to(tl.int32)
    token = tl.where(is_mask, sizes.parallel_drafting_token_id, bonus + prefill + shifted)
    tl.store(out.input_ids + row, token, mask=in_range)
    tl.store(out.positions + row, tl.where(live, position, 0), mask=in_range)

    staging_start = req * sizes.staging_length if IS_STATIC else start
    source = tl.where(is_valid, staging_start + offset, tl.where(is_mask, MASK_ROW, PAD_ROW))
    tl.store(out.row_map + row, source.to(tl.int32), mask=in_range)

    writes_kv = (is_valid | is_mask) & (position < sizes.max_model_len) & (idx >= 0)
    for group in tl.static_range(NUM_GROUPS):
        block_size = groups.block_sizes[group]
        entry = groups.block_tables[group] + req.to(tl.int64) * block_table_strides[group] + position // block_size
        kv_block = tl.load(entry, mask=writes_kv, other=0).to(tl.int64)
        slot = tl.where(writes_kv & (kv_block > 0), kv_block * block_size + position % block_size, PAD_SLOT)
        tl.store(out.slot_mappings + group * sizes.slots_stride + row, slot, mask=in_range)


@triton.jit
def _fill_requests(block, target, out, sizes, IS_STATIC: tl.constexpr):
    """A block of requests: sequence lengths, what to sample, and what to draw it with."""
    req = block * REQS_PER_PROGRAM + tl.arange(0, REQS_PER_PROGRAM)
    in_range = req < sizes.num_reqs_padded
    live = req < sizes.num_reqs
    _start, draft_start, length, _p0, p_last, seq_len, base = _window(req, live, target, out, sizes, IS_STATIC)
    tl.store(out.seq_lens + req, tl.where(live, seq_len, 0).to(tl.int32), mask=in_range)
    if IS_STATIC:
        # A padding request has no rows of its own: it starts where the last real one ends.
        first = tl.minimum(req, sizes.num_reqs) * sizes.static_length
        tl.store(out.query_start_loc + req, first, mask=req <= sizes.num_reqs_padded)
    samples_per_req = sizes.num_speculative_tokens
    if IS_STATIC:
        samples_per_req = sizes.static_length - sizes.staging_length + 1
    idx = tl.load(target.idx_mapping + req, mask=live, other=-1).to(tl.int64)
    for i in range(samples_per_req):
        sample = req * samples_per_req + i
        drafts = live & (i < sizes.num_speculative_tokens)
        index = draft_start + tl.minimum(p_last + i - base, length - 1)
        tl.store(out.sample_indices + sample, tl.where(drafts, index, 0).to(tl.int64), mask=in_range)
        tl.store(out.sample_pos + sample, tl.where(drafts, p_last + 1 + i, 0), mask=in_range)
        tl.store(out.sample_idx_mapping + sample, tl.where(drafts, idx, -1), mask=in_range)
    mine = live & (idx >= 0)
    # Model Runner V2 has them in the host's memory: four loads in flight, not one after another.
    temperature, seed = tl.load(target.temperature + idx, mask=mine), tl.load(target.seeds + idx, mask=mine)
    top_k, top_p = tl.load(target.top_k + idx, mask=mine), tl.load(target.top_p + idx, mask=mine)
    tl.store(out.temperature + idx, temperature, mask=mine)
    tl.store(out.seeds + idx, seed, mask=mine)
    tl.store(out.top_k + idx, top_k, mask=mine)
    tl.store(out.top_p + idx, top_p, mask=mine)


@triton.jit
def _stage_row(
    program,
    target,
    out,
    aux,
    aux_strides,
    sizes,
    IS_STATIC: tl.constexpr,
    AUX_WIDTHS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One aux row of one staging row, which holds those of a target row side by side."""
    staging_row = program // len(AUX_WIDTHS)
    chosen_part = program % len(AUX_WIDTHS)
    source_row = staging_row
    is_valid = True
    if IS_STATIC:
        req = staging_row // sizes.staging_length
        live = req < sizes.num_reqs
        start = tl.load(target.query_start_loc + req, mask=live, other=0)
        end = tl.load(target.query_start_loc + req + 1, mask=live, other=0)
        rejected = tl.load(target.num_rejected + req, mask=live, other=0)
        j = staging_row - req * sizes.staging_length
        is_valid = j < end - start - rejected
        source_row = start + j
    first_column = 0
    for part in tl.static_range(len(AUX_WIDTHS)):
        width = AUX_WIDTHS[part]
        if chosen_part == part:
            source = aux[part] + tl.multiple_of(tl.cast(source_row, tl.int64) * aux_strides[part], VECTOR)
            staged = out.staging + tl.multiple_of(tl.cast(staging_row, tl.int64) * sizes.staging_stride, VECTOR)
            staged += first_column
            for column_start in range(0, width, COLUMNS_PER_STEP):
                column = column_start + tl.arange(0, COLUMNS_PER_STEP)
                values = tl.load(source + column, mask=(column < width) & is_valid, other=0.0)
                tl.store(staged + column, values, mask=column < width)
        first_column += width
