"""prepare_inputs: one launch from the target's batch to the drafter's batch.

Read ``prepare_inputs_torch``: the reference, written with ``geometry``, and what a CPU runs. ``prepare_inputs_triton``,
in a file of its own, computes the same in one launch.
"""

import torch
from torch import Tensor

from peagle_kernels import geometry
from peagle_kernels.batch import DraftBuffers, KVGroups, TargetBatch
from peagle_kernels.geometry import MASK_ROW, PAD_ROW, PAD_SLOT
from peagle_kernels.layout import DraftBatch
from peagle_kernels.prepare_inputs_kernel import INTERPRETED, prepare_inputs_triton


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
    build = prepare_inputs_torch if out.input_ids.is_cpu and not INTERPRETED else prepare_inputs_triton
    build(
        target,
        aux,
        groups,
        batch,
        out,
        max_model_len=max_model_len,
        parallel_drafting_token_id=parallel_drafting_token_id,
    )


def prepare_inputs_torch(
    target: TargetBatch,
    aux: tuple[Tensor, ...],
    groups: KVGroups,
    batch: DraftBatch,
    out: DraftBuffers,
    *,
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
    special = torch.where(rows.is_mask, MASK_ROW, PAD_ROW)
    out.row_map[:num_real] = torch.where(rows.is_valid, staged_row, special)

    writes_kv = (rows.is_valid | rows.is_mask) & (idx >= 0)[rows.req]
    for group, (table, size) in enumerate(zip(groups.block_tables, groups.block_sizes, strict=True)):
        out.slot_mappings[group, :num_real] = geometry.slots(
            rows.position, writes_kv, rows.req, table, size, max_model_len
        )

    out.seq_lens[:num_reqs] = win.seq_len
    _fill_samples(win, idx, start, batch, out)
    _fill_padding(batch, num_real, len(groups.block_tables), out)
    if target.temperature is not out.temperature:  # V1 samples by its own, and passes these
        mine = idx[idx >= 0]
        for name in ("temperature", "seeds", "top_k", "top_p"):
            getattr(out, name)[mine] = getattr(target, name)[mine]
    if aux:
        _stage(target, aux, win, batch, out)


def _fill_samples(win: geometry.Window, idx: Tensor, start: Tensor, batch: DraftBatch, out: DraftBuffers) -> None:
    """Which rows to sample. Unused samples, padding requests' among them, get row 0 and request -1."""
    num_reqs, num_k, room = batch.num_reqs, batch.num_speculative_tokens, batch.samples_per_req
    indices, positions, req = (
        buffer[: batch.num_reqs_padded * room].reshape(batch.num_reqs_padded, room)
        for buffer in (out.sample_indices, out.sample_pos, out.sample_idx_mapping)
    )
    if room > num_k or batch.num_reqs_padded > num_reqs:
        indices[...], positions[...], req[...] = 0, 0, -1
    if num_k:
        indices[:num_reqs, :num_k] = geometry.sample_rows(win, start, num_k)
        # The row at position P yields the token at P + 2; a draw is keyed by the position before it.
        draws = torch.arange(1, num_k + 1, device=idx.device)
        positions[:num_reqs, :num_k] = win.p_last[:, None] + draws
        req[:num_reqs, :num_k] = idx[:, None]


def _fill_padding(batch: DraftBatch, num_real: int, num_groups: int, out: DraftBuffers) -> None:
    """Rows and requests past the real ones: inert values, with which no KV is written."""
    if batch.num_rows > num_real:
        padding = slice(num_real, batch.num_rows)
        out.input_ids[padding] = 0
        out.positions[padding] = 0
        out.row_map[padding] = PAD_ROW
        out.slot_mappings[:num_groups, padding] = PAD_SLOT
    if batch.num_reqs_padded > batch.num_reqs:
        out.seq_lens[batch.num_reqs : batch.num_reqs_padded] = 0


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
