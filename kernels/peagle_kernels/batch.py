"""What ``prepare_inputs`` reads and writes: tensors that the kernel takes as they are."""

from typing import NamedTuple

import torch
from torch import Tensor


class TargetBatch(NamedTuple):
    """One finished target step, as vLLM's runners hold it.

    The next token of request ``b`` is ``last_sampled[idx_mapping[b]]`` where ``num_sampled[b] > 0``; elsewhere (a
    prefill chunk that is not the last) ``next_prefill_tokens[idx_mapping[b]]``.
    """

    input_ids: Tensor  # [>= num_target_rows] int
    positions: Tensor  # [>= num_target_rows] int64
    query_start_loc: Tensor  # [>= num_reqs + 1] int32
    num_rejected: Tensor  # [>= num_reqs] int32, refused draft tokens
    num_sampled: Tensor  # [>= num_reqs] int32
    idx_mapping: Tensor  # [>= num_reqs] int, row of the request state; -1 owns no blocks (dummy)
    last_sampled: Tensor  # [max_num_reqs] int
    next_prefill_tokens: Tensor  # [max_num_reqs] int
    temperature: Tensor  # [max_num_reqs] float32, by row of the request state
    seeds: Tensor  # [max_num_reqs] int64, likewise
    top_k: Tensor  # [max_num_reqs] int32, likewise; the vocabulary's size for none
    top_p: Tensor  # [max_num_reqs] float32, likewise; 1 for none


class KVGroups(NamedTuple):
    """The draft layers' KV cache groups. Empty while memory is profiled."""

    block_tables: tuple[Tensor, ...]  # each [>= num_reqs, max_blocks] int32, batch order
    block_sizes: tuple[int, ...]  # tokens a block


class DraftBuffers(NamedTuple):
    """Buffers that ``prepare_inputs`` fills; those that a CUDA graph reads keep their addresses from capture on.

    The caller fills ``query_start_loc`` for the ragged layout; else it is filled here. All other fields are outputs.
    """

    input_ids: Tensor  # [max_rows] int32
    positions: Tensor  # [max_rows] int64
    row_map: Tensor  # [max_rows] int32: staging row, MASK_ROW or PAD_ROW
    slot_mappings: Tensor  # [num_groups, max_rows] int64
    query_start_loc: Tensor  # [max_num_reqs + 1] int32
    seq_lens: Tensor  # [max_num_reqs] int32
    sample_indices: Tensor  # [max_num_reqs * K_max] int64, draft row of each sample
    sample_pos: Tensor  # [max_num_reqs * K_max] int64, position before the sampled token
    sample_idx_mapping: Tensor  # [max_num_reqs * K_max] int64, idx_mapping of each sample; -1 is inert
    staging: Tensor  # [max_staging_rows, sum of aux widths], captured hidden states side by side
    temperature: Tensor  # [max_num_reqs] float32, by row of the request state
    seeds: Tensor  # [max_num_reqs] int64, likewise
    top_k: Tensor  # [max_num_reqs] int32, likewise; the vocabulary's size for none
    top_p: Tensor  # [max_num_reqs] float32, likewise; 1 for none


def allocate_buffers(
    *, max_rows: int, max_num_reqs: int, max_speculative_tokens: int, staging: Tensor, **inherited: Tensor
) -> DraftBuffers:
    """Buffers for the largest batch, on ``staging``'s device.

    Args:
        inherited: buffers that exist already, by their names in ``DraftBuffers``; the others are made here, zeroed,
            with one KV group and every sample inert.
    """
    samples = max_num_reqs * max_speculative_tokens
    shapes = {
        **dict.fromkeys(("input_ids", "row_map"), ((max_rows,), torch.int32)),
        "positions": ((max_rows,), torch.int64),
        "slot_mappings": ((1, max_rows), torch.int64),
        "query_start_loc": ((max_num_reqs + 1,), torch.int32),
        **dict.fromkeys(("sample_indices", "sample_pos", "sample_idx_mapping"), ((samples,), torch.int64)),
        **dict.fromkeys(("seq_lens", "top_k"), ((max_num_reqs,), torch.int32)),
        **dict.fromkeys(("temperature", "top_p"), ((max_num_reqs,), torch.float32)),
        "seeds": ((max_num_reqs,), torch.int64),
    }
    made = {name: shape for name, shape in shapes.items() if name not in inherited}
    buffers = {name: torch.zeros(shape, dtype=dtype, device=staging.device) for name, (shape, dtype) in made.items()}
    buffers["sample_idx_mapping"].fill_(-1)
    return DraftBuffers(staging=staging, **inherited, **buffers)
