"""prepare_inputs: one launch from the target's batch to the drafter's batch.

Read ``prepare_inputs_torch``: the reference, written with ``geometry``, and what a CPU runs. ``prepare_inputs_triton``,
in a file of its own, computes the same in one launch.
"""

import torch
from torch import Tensor

from peagle_kernels import geometry
from peagle_kernels.batch import DraftBuffers, DraftStep, KVGroups, TargetBatch
from peagle_kernels.geometry import MASK_ROW, PAD_ROW, PAD_SLOT
from peagle_kernels.layout import Layout
from peagle_kernels.prepare_inputs_kernel import INTERPRETED, prepare_inputs_triton


def prepare_inputs(
    target: TargetBatch,
    aux: tuple[Tensor, ...],
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
        layout: rows a request; where it is ragged, ``out.query_start_loc`` must hold the starts already.
        out: filled up to ``layout.num_rows`` rows, ``layout.num_reqs_padded`` requests and their samples; every one
            of those elements is written. Temperatures and seeds are written for the batch's own requests.
    """
    if out.input_ids.is_cpu and not INTERPRETED:
        prepare_inputs_torch(target, aux, groups, layout, step, out)
    else:
        prepare_inputs_triton(target, aux, groups, layout, step, out)


def prepare_inputs_torch(
    target: TargetBatch,
    aux: tuple[Tensor, ...],
    groups: KVGroups,
    layout: Layout,
    step: DraftStep,
    out: DraftBuffers,
) -> None:
    """The meaning of ``prepare_inputs`` in plain torch. No loop over rows or requests."""
    num_reqs, num_k = step.num_reqs, step.num_speculative_tokens
    if layout.static_length:
        # A padding request has no rows of its own: it starts where the last real one ends.
        request = torch.arange(layout.num_reqs_padded + 1, device=target.positions.device)
        out.query_start_loc[: layout.num_reqs_padded + 1] = request.clamp(max=num_reqs) * layout.static_length
    start = out.query_start_loc[: num_reqs + 1]
    query_start_loc = target.query_start_loc[: num_reqs + 1]
    idx = target.idx_mapping[:num_reqs]

    win = geometry.window(
        query_start_loc, target.positions, target.num_rejected[:num_reqs], start, num_k, step.max_model_len
    )
    rows = geometry.rows(win, start, num_k)
    num_real = len(rows.req)

    first_row = query_start_loc[:-1]
    state = idx.clamp(min=0)
    sampled = target.num_sampled[:num_reqs] > 0
    bonus = torch.where(sampled, target.last_sampled[state], target.next_prefill_tokens[state])
    staged_row = first_row[rows.req] + rows.offset  # row of the target's batch, meaningless outside the valid ones
    next_row = (staged_row + 1).clamp(0, step.num_target_rows - 1)
    token = torch.where(rows.position == win.p_last[rows.req], bonus[rows.req], target.input_ids[next_row])
    token = torch.where(rows.is_valid, token, torch.where(rows.is_mask, step.parallel_drafting_token_id, 0))
    out.input_ids[:num_real] = token
    out.positions[:num_real] = rows.position

    if layout.static_length:
        staged_row = rows.req * layout.staging_length + rows.offset
    special = torch.where(rows.is_mask, MASK_ROW, PAD_ROW)
    out.row_map[:num_real] = torch.where(rows.is_valid, staged_row, special)

    writes_kv = (rows.is_valid | rows.is_mask) & (idx >= 0)[rows.req]
    for group, (table, size) in enumerate(zip(groups.block_tables, groups.block_sizes, strict=True)):
        out.slot_mappings[group, :num_real] = geometry.slots(
            rows.position, writes_kv, rows.req, table, size, step.max_model_len
        )

    out.seq_lens[:num_reqs] = win.seq_len
    _fill_samples(win, idx, start, layout, num_k, out)
    _fill_padding(layout, num_reqs, num_real, len(groups.block_tables), out)
    mine = idx[idx >= 0]
    out.temperature[mine] = target.temperature[mine]
    out.seeds[mine] = target.seeds[mine]
    if aux:
        _stage(target, aux, win, layout, step, out)


def _fill_samples(
    win: geometry.Window, idx: Tensor, start: Tensor, layout: Layout, num_k: int, out: DraftBuffers
) -> None:
    """Which rows to sample. Unused samples, padding requests' among them, get row 0 and request -1."""
    num_reqs, room = len(idx), layout.samples_per_req(num_k)
    indices, positions, req = (
        buffer[: layout.num_reqs_padded * room].reshape(layout.num_reqs_padded, room)
        for buffer in (out.sample_indices, out.sample_pos, out.sample_idx_mapping)
    )
    if room > num_k or layout.num_reqs_padded > num_reqs:
        indices[...], positions[...], req[...] = 0, 0, -1
    if num_k:
        indices[:num_reqs, :num_k] = geometry.sample_rows(win, start, num_k)
        # The row at position P yields the token at P + 2; a draw is keyed by the position before it.
        draws = torch.arange(1, num_k + 1, device=idx.device)
        positions[:num_reqs, :num_k] = win.p_last[:, None] + draws
        req[:num_reqs, :num_k] = idx[:, None]


def _fill_padding(layout: Layout, num_reqs: int, num_real: int, num_groups: int, out: DraftBuffers) -> None:
    """Rows and requests past the real ones: inert values, with which no KV is written."""
    if layout.num_rows > num_real:
        padding = slice(num_real, layout.num_rows)
        out.input_ids[padding] = 0
        out.positions[padding] = 0
        out.row_map[padding] = PAD_ROW
        out.slot_mappings[:num_groups, padding] = PAD_SLOT
    if layout.num_reqs_padded > num_reqs:
        out.seq_lens[num_reqs : layout.num_reqs_padded] = 0


def _stage(
    target: TargetBatch,
    aux: tuple[Tensor, ...],
    win: geometry.Window,
    layout: Layout,
    step: DraftStep,
    out: DraftBuffers,
) -> None:
    """Captured hidden states side by side; compact staging holds zeros where nothing is valid."""
    if not layout.static_length:
        torch.cat([hidden[: step.num_target_rows] for hidden in aux], dim=-1, out=out.staging[: step.num_target_rows])
        return
    num_reqs, length = step.num_reqs, layout.staging_length
    j = torch.arange(length, device=win.p0.device)
    source = target.query_start_loc[:num_reqs, None] + j
    valid = j < win.num_valid[:, None]
    gathered = torch.cat([hidden[source.clamp(max=step.num_target_rows - 1).flatten()] for hidden in aux], dim=-1)
    real = num_reqs * length
    out.staging[:real] = torch.where(valid.flatten()[:, None], gathered, 0)
    out.staging[real : layout.num_staging_rows] = 0
