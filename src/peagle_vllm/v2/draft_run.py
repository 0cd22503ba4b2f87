"""What one run of the drafter works on, and the dummy run that a graph is captured on."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from peagle_kernels import geometry
from peagle_kernels.layout import DraftBatch
from peagle_vllm.v2.attention import DraftAttention


@dataclass(frozen=True)
class DraftRun:
    """What one run of the drafter works on, in addition to the buffers."""

    batch: DraftBatch
    fc_inputs: torch.Tensor  # [1 + num_staging_rows, num_aux x target hidden]: room for mask_hidden, then staging
    hidden_states: torch.Tensor  # [num_rows, hidden_size] room for the drafter's input rows
    attn_metadata: dict[str, Any] | None  # the drafter's, by layer; None while memory is profiled
    # PIECEWISE where the forward runs in captured pieces. A FULL graph is around all of this.
    cudagraph_mode: CUDAGraphMode = CUDAGraphMode.NONE


def dummy_run(
    desc: BatchExecutionDescriptor, fc_inputs: torch.Tensor, hidden_states: torch.Tensor, attention: DraftAttention
) -> DraftRun:
    """A run that fills the graph ``desc``, with contents that compute and touch nothing. Buffers are the largest's."""
    is_full = desc.cg_mode == CUDAGraphMode.FULL
    if is_full:
        num_reqs, length = desc.num_reqs, desc.uniform_token_count
        num_k = length // 2  # the static layout has 2K rows a request, or 1 for K = 0
        starts = np.arange(num_reqs + 1, dtype=np.int32) * length
        batch = DraftBatch(num_reqs, 0, num_k, desc.num_tokens, num_reqs, length, num_k + 1)
    else:
        num_reqs = min(desc.num_tokens, len(attention.buffers.seq_lens))
        starts = np.linspace(0, desc.num_tokens, num_reqs + 1).astype(np.int32)
        batch = DraftBatch(num_reqs, 0, 0, desc.num_tokens, num_reqs)
    buffers = attention.buffers
    buffers.query_start_loc[: num_reqs + 1].copy_(torch.from_numpy(starts))
    buffers.seq_lens.zero_()
    buffers.seq_lens[:num_reqs].copy_(torch.from_numpy(np.diff(starts)))
    for zeros in (buffers.input_ids, buffers.positions, buffers.sample_indices, buffers.sample_pos):
        zeros.zero_()
    buffers.row_map.fill_(geometry.PAD_ROW)
    buffers.slot_mappings.fill_(geometry.PAD_SLOT)
    buffers.sample_idx_mapping.fill_(-1)
    attention.block_tables.get_dummy_block_tables(num_reqs)  # zeroes the tables that metadata reads
    bound = None if is_full else np.diff(starts)
    metadata = attention.metadata(num_reqs, starts, seq_lens_bound=bound, capture=is_full)
    return DraftRun(batch, fc_inputs[: 1 + batch.num_staging_rows], hidden_states[: batch.num_rows], metadata)


def first_rows(buffer: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The first rows of a buffer of graphs, or as many of memory that lives for this step."""
    return buffer[:num_rows] if num_rows <= len(buffer) else buffer.new_empty(num_rows, buffer.shape[1])
