"""What goes into and comes out of ``expand``: the target's batch and the draft's buffers."""

from dataclasses import dataclass

import torch


@dataclass
class TargetBatch:
    """One finished target step, as vLLM's runners hold it.

    The next token of request ``b`` is ``last_sampled[idx_mapping[b]]`` where
    ``num_sampled[b] > 0``; elsewhere (a prefill chunk that is not the last)
    ``next_prefill_tokens[idx_mapping[b]]``.
    """

    input_ids: torch.Tensor  # [num_target_rows] int
    positions: torch.Tensor  # [num_target_rows] int64
    query_start_loc: torch.Tensor  # [>= num_reqs + 1] int32
    num_rejected: torch.Tensor  # [>= num_reqs] int32, refused draft tokens
    num_sampled: torch.Tensor  # [>= num_reqs] int32
    idx_mapping: torch.Tensor  # [>= num_reqs] int, row of the request state; -1 owns no blocks (dummy)
    last_sampled: torch.Tensor  # [max_num_reqs] int
    next_prefill_tokens: torch.Tensor  # [max_num_reqs] int
    num_reqs: int
    num_rows: int


@dataclass
class KVGroups:
    """The draft layers' KV cache groups. Empty while memory is profiled."""

    block_tables: tuple[torch.Tensor, ...]  # each [>= num_reqs, max_blocks] int32, batch order
    block_sizes: tuple[int, ...]  # tokens a block


@dataclass
class DraftBuffers:
    """Persistent buffers that ``expand`` fills; their addresses never change.

    ``query_start_loc`` is an input: it is the layout. Everything else is an output.
    """

    input_ids: torch.Tensor  # [max_rows] int32
    positions: torch.Tensor  # [max_rows] int64
    row_map: torch.Tensor  # [max_rows] int32: staging row, MASK_ROW or PAD_ROW
    slot_mappings: torch.Tensor  # [num_groups, max_rows] int64
    query_start_loc: torch.Tensor  # [max_num_reqs + 1] int32
    seq_lens: torch.Tensor  # [max_num_reqs] int32
    sample_indices: torch.Tensor  # [max_num_reqs * K_max] int64, draft row of each sample
    sample_positions: torch.Tensor  # [max_num_reqs * K_max] int64, position before the sampled token
    sample_req: torch.Tensor  # [max_num_reqs * K_max] int64, idx_mapping of each sample; -1 is inert
    staging: torch.Tensor  # [max_staging_rows, sum of aux widths], captured hidden states side by side

    @classmethod
    def allocate(
        cls,
        *,
        max_rows: int,
        max_num_reqs: int,
        max_speculative_tokens: int,
        max_staging_rows: int,
        staging_width: int,
        num_groups: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "DraftBuffers":
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        max_samples = max_num_reqs * max_speculative_tokens
        return cls(
            input_ids=zeros(max_rows, dtype=torch.int32),
            positions=zeros(max_rows),
            row_map=zeros(max_rows, dtype=torch.int32),
            slot_mappings=zeros(num_groups, max_rows),
            query_start_loc=zeros(max_num_reqs + 1, dtype=torch.int32),
            seq_lens=zeros(max_num_reqs, dtype=torch.int32),
            sample_indices=zeros(max_samples),
            sample_positions=zeros(max_samples),
            sample_req=zeros(max_samples).fill_(-1),
            staging=zeros(max_staging_rows, staging_width, dtype=dtype),
        )
