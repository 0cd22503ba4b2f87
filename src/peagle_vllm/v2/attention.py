"""What attention backends read of a draft batch: block tables, slots and metadata of the drafter's layers."""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig, replace
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.utils import AttentionGroup

from peagle_kernels.batch import DraftBuffers, KVGroups
from peagle_vllm.kv_groups import with_draft_model
from peagle_vllm.v2.cudagraph import draft_graphs

# Above these rows FlashAttention 3 splits KV less often in a graph, so that its buffers do not grow: 32 splits of a
# decode batch at max_num_seqs would be gigabytes.
MAX_SPLIT_KV_ROWS = 512


@dataclass(eq=False)
class DraftAttention:
    """The drafter's attention groups over the buffers of a draft batch."""

    vllm_config: VllmConfig
    attn_groups: list[list[AttentionGroup]]  # by KV cache group; empty where the drafter has no layer in it
    kv_cache_config: KVCacheConfig
    block_tables: BlockTables
    buffers: DraftBuffers  # ``slot_mappings`` has one row for each KV cache group that the drafter uses
    is_prefilling: torch.Tensor  # [max_num_reqs] bool on the host

    def __post_init__(self) -> None:
        self.group_ids = [gid for gid, groups in enumerate(self.attn_groups) if groups]
        tables = self.block_tables
        self.kv_groups = KVGroups(  # what ``prepare_inputs`` looks slots up in
            tuple(tables.input_block_tables[gid] for gid in self.group_ids),
            tuple(tables.block_sizes[gid] for gid in self.group_ids),
        )
        self._slots_by_layer = {
            layer: self.buffers.slot_mappings[row]
            for row, gid in enumerate(self.group_ids)
            for group in self.attn_groups[gid]
            for layer in group.layer_names
        }
        self._groups = [group for groups in self.attn_groups for group in groups]
        for group in self._groups:
            _adapt_flash_attention(group.get_metadata_builder())

    def slot_mapping(self, num_rows: int) -> dict[str, torch.Tensor]:
        """By layer: [num_rows] int64 KV slots."""
        return {layer: slots[:num_rows] for layer, slots in self._slots_by_layer.items()}

    def map_kernel_block_tables(self, num_reqs: int) -> None:
        """Refresh in place the tables of backends whose blocks are smaller than the KV cache manager's.

        Their metadata holds a table of its own, which vLLM fills when metadata is built: a replayed graph builds none.
        """
        for group in self._groups:
            group.map_to_kernel_block_table(self.block_tables.input_block_tables[group.kv_cache_group_id][:num_reqs])

    def metadata(
        self,
        num_reqs: int,
        starts: np.ndarray,
        num_rows: int | None = None,
        seq_lens_bound: np.ndarray | None = None,
        capture: bool = False,
    ) -> dict[str, Any]:
        """vLLM's attention metadata by layer, from host bounds and the buffers' lengths.

        Args:
            starts: [<= num_reqs + 1] int32 draft rows of each request; padding requests begin where the last one ends.
            num_rows: rows with those of padding requests; None: those of ``starts``.
            seq_lens_bound: [<= num_reqs] upper bounds of the sequence lengths; None: max_model_len.
            capture: for a FULL graph.
        """
        starts = np.append(starts, np.full(num_reqs + 1 - len(starts), starts[-1]))
        num_rows = int(starts[-1]) if num_rows is None else num_rows
        bound, max_seq_len = None, self.vllm_config.model_config.max_model_len
        if seq_lens_bound is not None:
            bound = torch.from_numpy(np.append(seq_lens_bound, np.zeros(num_reqs - len(seq_lens_bound), np.int32)))
            max_seq_len = int(seq_lens_bound.max())
        slot_mappings: list[torch.Tensor | None] = [None] * len(self.attn_groups)
        for row, gid in enumerate(self.group_ids):
            slot_mappings[gid] = self.buffers.slot_mappings[row, :num_rows]
        metadata = build_attn_metadata(
            attn_groups=self.attn_groups,
            num_reqs=num_reqs,
            num_tokens=num_rows,
            query_start_loc_gpu=self.buffers.query_start_loc[: num_reqs + 1],
            query_start_loc_cpu=torch.from_numpy(starts),
            max_query_len=int((starts[1:] - starts[:-1]).max()),
            seq_lens=self.buffers.seq_lens[:num_reqs],
            max_seq_len=max_seq_len,
            block_tables=tuple(table[:num_reqs] for table in self.block_tables.input_block_tables),
            slot_mappings=slot_mappings,  # indexed at the drafter's groups only
            kv_cache_config=self.kv_cache_config,
            for_cudagraph_capture=capture,
            seq_lens_cpu_upper_bound=bound,
            positions=self.buffers.positions[:num_rows],
            is_prefilling=self.is_prefilling[:num_reqs],
        )
        if capture:
            _fix_num_splits(self._groups, metadata)
        return metadata


def whole_kv(vllm_config: VllmConfig) -> VllmConfig:
    """The same without decode context parallelism, as vLLM's DFlash: every rank keeps the drafter's whole KV cache."""
    if vllm_config.parallel_config.decode_context_parallel_size == 1:
        return vllm_config
    config = copy.copy(vllm_config)
    config.parallel_config = replace(vllm_config.parallel_config, decode_context_parallel_size=1)
    config.parallel_config.data_parallel_index = vllm_config.parallel_config.data_parallel_index  # lost by replace
    return config


def draft_attention_config(vllm_config: VllmConfig) -> VllmConfig:
    """A copy in which the drafter's attention builders find the drafter's own batches.

    They size buffers by the largest captured batch, and treat requests wider than ``1 + num_speculative_tokens``
    as prefills: a static request has up to 2K rows.
    """
    config = with_draft_model(vllm_config)
    config.speculative_config = copy.copy(vllm_config.speculative_config)
    if (cache_dtype := config.speculative_config.kv_cache_dtype) is not None:
        config.cache_config = copy.copy(vllm_config.cache_config)  # ``replace`` would forget the layout
        config.cache_config.cache_dtype = cache_dtype
    config.speculative_config.num_speculative_tokens = 2 * vllm_config.num_speculative_tokens - 1
    graphs = draft_graphs(vllm_config, vllm_config.compilation_config.cudagraph_mode)
    if graphs.decode:
        config.compilation_config = copy.copy(vllm_config.compilation_config)
        sizes = sorted({shape.num_rows for shape in graphs.decode})
        config.compilation_config.cudagraph_capture_sizes = sizes
        config.compilation_config.max_cudagraph_capture_size = sizes[-1]
    return config


def split_blocks(
    attn_groups: list[list[AttentionGroup]],
    target_attn_groups: list[list[AttentionGroup]],
    vllm_config: VllmConfig,
    device: torch.device,
) -> None:
    """Let the drafter's backends read KV blocks as small as those that the runner has split the cache into.

    The runner asks the backends of all layers, vLLM's speculator the drafter's alone, which may take larger blocks.
    """
    ours, theirs = ([group for groups in both for group in groups] for both in (attn_groups, target_attn_groups))
    sizes = {layer: group.kernel_block_size for group in theirs for layer in group.layer_names}
    for group in ours:
        if (size := sizes[group.layer_names[0]]) != group.kernel_block_size:
            group.create_metadata_builders(vllm_config, device, size, len(group.metadata_builders))


def share_workspace(attn_groups: list[list[AttentionGroup]], target_attn_groups: list[list[AttentionGroup]]) -> None:
    """Let the drafter's builders use the target's scratch buffer where it is as large: the two never attend at once.

    FlashInfer's takes gigabytes at large ``max_num_batched_tokens``, and no profile run counts it.
    """

    def with_workspace(groups: list[list[AttentionGroup]]) -> Iterator[tuple[Any, torch.Tensor]]:
        for builder in (builder for some in groups for group in some for builder in group.metadata_builders):
            # None also of a composite whose builders have none.
            if (buffer := getattr(builder, "_get_workspace_buffer", lambda: None)()) is not None:
                yield builder, buffer

    theirs = [buffer for _, buffer in with_workspace(target_attn_groups)]
    for builder, own in with_workspace(attn_groups) if theirs else ():
        builder.set_workspace_buffer(max(*theirs, own, key=torch.Tensor.numel))


def _adapt_flash_attention(builder: Any) -> None:
    """Two settings of FlashAttention's builder that suit the target, not the drafter.

    Its ahead-of-time schedule is wrong for a sliding-window drafter (vLLM's DFlash turns it off, too), until the
    builder looks at its own group's window. And MAX_SPLIT_KV_ROWS.
    """
    if getattr(builder, "aot_schedule", False):
        layers = builder.vllm_config.compilation_config.static_forward_context
        builder.aot_schedule = not any(layers[name].sliding_window for name in builder.layer_names)
    if getattr(builder, "max_cudagraph_size", None):
        builder.max_cudagraph_size = min(builder.max_cudagraph_size, MAX_SPLIT_KV_ROWS)


def _fix_num_splits(groups: Iterable[AttentionGroup], metadata: dict[str, Any]) -> None:
    """A number where FlashAttention 3 leaves it to a heuristic, whose value would be frozen at capture.

    It is the most that its scheduler may use: one long request beside many short ones needs them.
    """
    for group in groups:
        group_metadata = metadata[group.layer_names[0]]
        most = getattr(group.get_metadata_builder(), "max_num_splits", 0)
        if most and not group_metadata.max_num_splits:
            group_metadata.max_num_splits = max(1, most * MAX_SPLIT_KV_ROWS // group_metadata.num_actual_tokens)
