"""``ParallelEagleSpeculator``: P-EAGLE on Model Runner V2.

It is an ``EagleSpeculator`` whose ``propose`` builds a draft batch of its own instead of reusing
the target's: see docs/architecture.md for one batch walked through it.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.kv_cache_interface import KVCacheConfig, get_kv_cache_spec_sliding_window
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.dp_utils import DPSyncState, dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id
from vllm.v1.worker.utils import AttentionGroup

from peagle_kernels import DraftBuffers, DraftStep, KVGroups, Layout, TargetBatch, broadcast, expand, geometry
from peagle_vllm.core.loaded import check_loaded_head

logger = init_logger(__name__)


class ParallelEagleSpeculator(EagleSpeculator):
    """Drafts all K tokens of every request in one drafter forward."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        super().__init__(vllm_config, device)
        # The runner leaves room for these rows when it sizes its dummy batches.
        self.num_query_per_req = self.num_speculative_steps
        self.num_extra_query_per_req = self.num_speculative_steps - 1
        self.mask_token_id = get_parallel_drafting_token_id(self.draft_model_config.hf_config)

        # A draft batch has K-1 more rows a request than the target's, and vLLM's warm-up fills the
        # target's batch to the brim, so the inherited buffers are too short.
        self.max_draft_rows = self.max_num_tokens + self.max_num_reqs * self.num_extra_query_per_req
        self.input_buffers = InputBuffers(self.max_num_reqs, self.max_draft_rows, device)
        self._arange = torch.arange(self.max_num_reqs + 1, dtype=torch.int32, device=device)
        self._columns = torch.arange(self.num_speculative_steps, dtype=torch.int32, device=device)
        self.hidden_states = torch.zeros(self.max_draft_rows, self.hidden_size, dtype=self.dtype, device=device)

    @property
    def _max_len(self) -> int:
        """``max_model_len`` now: vLLM can shrink it to what fits in memory after this speculator is built."""
        return self.vllm_config.model_config.max_model_len

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        # The mask rows have no multimodal embedding; text drafts stay exact for text.
        self.supports_mm_inputs = False
        check_loaded_head(self.model, self.vllm_config)
        self.buffers = self._allocate_buffers()

    def _allocate_buffers(self) -> DraftBuffers:
        """Draft buffers whose inputs to the model are the inherited ones. Slots follow in ``set_attn``."""
        buffers = DraftBuffers.allocate(
            max_rows=self.max_draft_rows,
            max_num_reqs=self.max_num_reqs,
            max_speculative_tokens=self.num_speculative_steps,
            # Compact staging of a static batch, after mask_hidden's row.
            max_staging_rows=1 + self.max_num_reqs * (self.num_speculative_steps + 1),
            staging_width=self.model.mask_hidden.numel(),
            num_groups=0,
            dtype=self.dtype,
            device=self.device,
        )
        inputs = self.input_buffers
        return replace(
            buffers,
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
        )

    def set_attn(
        self,
        model_state: ModelState,
        kv_cache_config: KVCacheConfig,
        block_tables: BlockTables,
        target_input_buffers: InputBuffers,
        target_attn_groups: list[list[AttentionGroup]],
    ) -> None:
        super().set_attn(model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups)
        self._turn_off_windowed_schedules()
        self.draft_group_ids = [gid for gid, groups in enumerate(self.attn_groups) if groups]
        # BlockTables.slot_mappings belongs to the target's graph and is too narrow for a draft batch.
        self.buffers.slot_mappings = torch.full(
            (len(self.draft_group_ids), self.max_draft_rows),
            geometry.PAD_SLOT,
            dtype=torch.int64,
            device=self.device,
        )

    def _turn_off_windowed_schedules(self) -> None:
        """FlashAttention's ahead-of-time schedule is wrong for a sliding-window drafter; vLLM's DFlash does the same.

        Ends when FlashAttention's builder looks at its own group's window.
        """
        for group in (group for groups in self.attn_groups for group in groups):
            builder = group.get_metadata_builder()
            if getattr(builder, "aot_schedule", False) and get_kv_cache_spec_sliding_window(builder.kv_cache_spec):
                builder.aot_schedule = False

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """No graph yet: drafts run eagerly (docs/performance.md)."""

    def capture(self) -> None:
        logger.info("P-EAGLE drafts run eagerly on Model Runner V2; nothing to capture for the drafter.")

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
        aux_hidden_states: list[torch.Tensor] | None,  # num_aux x [num_tokens, hidden_size]
        num_sampled: torch.Tensor,  # [num_reqs]
        num_rejected: torch.Tensor,  # [num_reqs]
        last_sampled: torch.Tensor,  # [max_num_reqs]
        next_prefill_tokens: torch.Tensor,  # [num_prefill_lookahead, max_num_reqs]
        temperature: torch.Tensor,  # [max_num_reqs]
        seeds: torch.Tensor,  # [max_num_reqs]
        dp_sync_state: DPSyncState | None = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: tuple[list[torch.Tensor], torch.Tensor] | None = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Draft K tokens for every request.

        Returns:
            [num_reqs, K_max] int64 draft tokens; columns from ``num_speculative_tokens`` on mean nothing.
        """
        num_reqs = input_batch.num_reqs
        num_k = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        skip_attn = dummy_run and skip_attn_for_dummy_run
        self._copy_request_inputs(num_reqs, input_batch.idx_mapping, temperature, seeds, dummy_run=dummy_run)
        assert aux_hidden_states, "P-EAGLE reads the target's auxiliary hidden states"
        assert num_sampled is not None and num_rejected is not None

        layout, lengths = self._choose_layout(input_batch.num_scheduled_tokens[:num_reqs], num_k)
        staging = self._staging(layout, input_batch.num_tokens)
        expand(
            TargetBatch(
                input_ids=input_batch.input_ids,
                positions=input_batch.positions,
                query_start_loc=input_batch.query_start_loc,
                num_rejected=num_rejected,
                num_sampled=num_sampled,
                idx_mapping=self.idx_mapping,
                last_sampled=last_sampled,
                next_prefill_tokens=next_prefill_tokens.view(-1),
                num_reqs=num_reqs,
                num_rows=input_batch.num_tokens,
            ),
            tuple(aux_hidden_states),
            KVGroups((), ()) if skip_attn else self._kv_groups(),
            layout,
            DraftStep(num_k, self._max_len, self.mask_token_id),
            replace(self.buffers, staging=staging[1:]),
        )
        combined = self.model.combine_hidden_states(staging)
        rows = slice(0, layout.num_rows)
        broadcast(self.hidden_states[rows], combined[1:], combined[0], self.buffers.row_map[rows])

        metadata = None
        if not skip_attn:
            metadata = self._draft_attn_metadata(num_reqs, layout, lengths, input_batch.seq_lens_cpu_upper_bound, num_k)
        hidden_states = self._forward(num_reqs, layout.num_rows, metadata)
        if num_k > 0:
            self._sample(num_reqs, num_k, hidden_states)
        return self.draft_tokens[:num_reqs]

    def _choose_layout(self, num_scheduled: np.ndarray, num_k: int) -> tuple[Layout, np.ndarray]:
        """Rows a request: static where every request verifies at most K_max + 1 rows, else ragged.

        Fills the draft's ``query_start_loc``.

        Args:
            num_scheduled: [num_reqs] verified rows, an upper bound under adaptive verification.

        Returns:
            The layout, and [num_reqs] draft rows of each request.
        """
        num_reqs, max_k = len(num_scheduled), self.num_speculative_steps
        length = geometry.static_length(max_k, num_k)
        if num_scheduled.max() <= max_k + 1 and length <= self._max_len and length * num_reqs <= self.max_num_tokens:
            lengths = np.full(num_reqs, length, dtype=np.int32)
            layout = Layout(length * num_reqs, num_reqs, static_length=length, staging_length=max_k + 1)
        else:
            lengths = geometry.ragged_lengths(torch.from_numpy(num_scheduled), num_k, self._max_len).numpy()
            layout = Layout(int(lengths.sum()), num_reqs)
        starts = self.buffers.query_start_loc[: num_reqs + 1]
        if layout.static_length:
            torch.mul(self._arange[: num_reqs + 1], length, out=starts)  # no copy from the host in a decode step
        else:
            async_tensor_h2d(np.cumsum([0, *lengths], dtype=np.int32), device=self.device, out=starts)
        return layout, lengths

    def _staging(self, layout: Layout, num_target_rows: int) -> torch.Tensor:
        """[1 + staged rows, num_aux x target hidden]: ``mask_hidden``, then room for captured rows.

        Projecting ``mask_hidden`` as one more row of ``fc`` costs nothing, and m follows every reload,
        sleep and dummy load of the weights by itself.
        """
        if layout.static_length:
            staging = self.buffers.staging[: 1 + layout.num_staging_rows]
        else:
            # A prefill's staging is large and short-lived: memory that the target's own activations
            # need at another time anyway.
            staging = self.buffers.staging.new_empty(1 + num_target_rows, self.buffers.staging.shape[1])
        staging[0].copy_(self.model.mask_hidden.view(-1))
        return staging

    def _kv_groups(self) -> KVGroups:
        tables = self.block_tables
        return KVGroups(
            tuple(tables.input_block_tables[gid] for gid in self.draft_group_ids),
            tuple(tables.block_sizes[gid] for gid in self.draft_group_ids),
        )

    def _draft_attn_metadata(
        self,
        num_reqs: int,
        layout: Layout,
        lengths: np.ndarray,
        target_seq_lens_upper_bound: torch.Tensor,
        num_k: int,
    ) -> dict[str, Any]:
        """vLLM's attention metadata of this draft batch, from host bounds and the device's lengths."""
        host_lengths = torch.from_numpy(lengths)
        query_start_loc_cpu = torch.zeros(num_reqs + 1, dtype=torch.int32)
        torch.cumsum(host_lengths, dim=0, out=query_start_loc_cpu[1:])
        appended = geometry.num_appended(num_k) - 1
        window_end = (target_seq_lens_upper_bound[:num_reqs] + appended).clamp(max=self._max_len)
        seq_lens_upper_bound = torch.maximum(window_end, host_lengths)
        slot_mappings: list[torch.Tensor | None] = [None] * len(self.attn_groups)
        for row, gid in enumerate(self.draft_group_ids):
            slot_mappings[gid] = self.buffers.slot_mappings[row, : layout.num_rows]
        return build_attn_metadata(
            attn_groups=self.attn_groups,
            num_reqs=num_reqs,
            num_tokens=layout.num_rows,
            query_start_loc_gpu=self.buffers.query_start_loc[: num_reqs + 1],
            query_start_loc_cpu=query_start_loc_cpu,
            max_query_len=int(host_lengths.max()),
            seq_lens=self.buffers.seq_lens[:num_reqs],
            max_seq_len=int(seq_lens_upper_bound.max()),
            block_tables=[table[:num_reqs] for table in self.block_tables.input_block_tables],
            slot_mappings=slot_mappings,  # indexed at draft groups only
            kv_cache_config=self.kv_cache_config,
            seq_lens_cpu_upper_bound=seq_lens_upper_bound.int(),
            positions=self.buffers.positions[: layout.num_rows],
            is_prefilling=self.draft_is_prefilling[:num_reqs],
        )

    def _forward(self, num_reqs: int, num_rows: int, attn_metadata: dict[str, Any] | None) -> torch.Tensor:
        """One drafter forward. Returns [num_rows, hidden_size] normed hidden states."""
        self._prepare_eplb_forward(num_rows)
        _, sync = dispatch_cg_and_sync_dp(
            None, num_reqs, num_rows, None, dp_size=self.dp_size, dp_rank=self.dp_rank, need_eager=True
        )
        slot_mapping = None
        if attn_metadata is not None:
            slot_mapping = {
                layer: self.buffers.slot_mappings[row, :num_rows]
                for row, gid in enumerate(self.draft_group_ids)
                for group in self.attn_groups[gid]
                for layer in group.layer_names
            }
        with set_forward_context(
            attn_metadata,
            self.vllm_config,
            num_tokens=num_rows,
            num_tokens_across_dp=None if sync is None else sync.num_tokens_across_dp,
            slot_mapping=slot_mapping,
            batch_descriptor=BatchDescriptor(num_tokens=num_rows),
            # vLLM compiles heads for at most max_num_batched_tokens rows; only its warm-up, which
            # ignores the draft slots, makes larger batches.
            skip_compiled=num_rows > self.max_num_tokens,
        ):
            hidden_states, _ = self.model(
                input_ids=self.buffers.input_ids[:num_rows],
                positions=self.buffers.positions[:num_rows],
                hidden_states=self.hidden_states[:num_rows],
                inputs_embeds=None,
            )
        return hidden_states

    def _sample(self, num_reqs: int, num_k: int, hidden_states: torch.Tensor) -> None:
        """Draft tokens from the sampled rows, into ``draft_tokens[:num_reqs, :num_k]``."""
        samples = slice(0, num_reqs * num_k)
        drafts = self.sample_draft(
            hidden_states[self.buffers.sample_indices[samples]],
            self.buffers.sample_positions[samples],
            self.buffers.sample_req[samples],
            self.temperature,
            self.seeds,
            self._columns[:num_k].repeat(num_reqs),
            self.draft_logits,
        )
        self.draft_tokens[:num_reqs, :num_k] = drafts.view(num_reqs, num_k)
