"""``ParallelEagleSpeculator``: P-EAGLE on Model Runner V2.

It is an ``EagleSpeculator`` whose ``propose`` builds a draft batch of its own instead of reusing
the target's: see docs/architecture.md for one batch walked through it. A decode step is one launch of ``expand`` and
one CUDA graph, which holds everything in ``_draft``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import KVCacheConfig, get_kv_cache_spec_sliding_window
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.dp_utils import DPSyncState, dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id
from vllm.v1.worker.utils import AttentionGroup

from peagle_kernels import DraftBuffers, DraftStep, KVGroups, Layout, TargetBatch, broadcast, expand, geometry
from peagle_vllm.core.draft_stats import DraftStats
from peagle_vllm.core.greedy import top_tokens
from peagle_vllm.core.loaded import check_loaded_head
from peagle_vllm.v2.cudagraph import DraftCudaGraphManager, draft_attention_config

logger = init_logger(__name__)


@dataclass(frozen=True)
class DraftBatch:
    """What one run of the drafter works on: shapes here, contents in the persistent buffers.

    Attributes:
        layout: rows and requests, padding included.
        samples_per_req: rows to sample of each request.
        staging: [1 + staged rows, num_aux x target hidden]: room for ``mask_hidden``, then captured rows.
        attn_metadata: the drafter's, by layer; None while memory is profiled.
        num_tokens_across_dp: [dp_size] rows of each data-parallel rank, on the host.
    """

    layout: Layout
    samples_per_req: int
    staging: torch.Tensor
    attn_metadata: dict[str, Any] | None
    num_tokens_across_dp: torch.Tensor | None


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
        # Draft columns of a batch that samples s rows a request: 0 .. s-1, again and again.
        self._columns = {
            samples: torch.arange(samples, dtype=torch.int32, device=device).repeat(self.max_num_reqs)
            for samples in range(1, self.num_speculative_steps + 1)
        }
        self.idx_mapping.fill_(-1)  # a dummy batch's requests: they own no blocks and sample nothing
        self.cudagraph_manager: DraftCudaGraphManager | None = None
        self.draft_stats = DraftStats()
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
        self._allocate_buffers()

    def _allocate_buffers(self) -> None:
        """Draft buffers whose inputs to the model are the inherited ones. Slots follow in ``set_attn``."""
        # mask_hidden's row, then a static batch's compact rows.
        staging_rows = 1 + self.max_num_reqs * (self.num_speculative_steps + 1)
        buffers = DraftBuffers.allocate(
            max_rows=self.max_draft_rows,
            max_num_reqs=self.max_num_reqs,
            max_speculative_tokens=self.num_speculative_steps,
            max_staging_rows=staging_rows,
            staging_width=self.model.mask_hidden.numel(),
            num_groups=0,
            dtype=self.dtype,
            device=self.device,
        )
        self.staging = buffers.staging
        inputs = self.input_buffers
        self.buffers = replace(
            buffers,
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            staging=self.staging[1:],
            temperature=self.temperature,
            seeds=self.seeds,
        )

    @property
    def attn_vllm_config(self) -> VllmConfig:
        return draft_attention_config(self.vllm_config)

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
        slots = (len(self.draft_group_ids), self.max_draft_rows)
        self.buffers = replace(
            self.buffers,
            slot_mappings=torch.full(slots, geometry.PAD_SLOT, dtype=torch.int64, device=self.device),
        )
        self.slot_mappings_by_layer = {
            layer: self.buffers.slot_mappings[row]
            for row, gid in enumerate(self.draft_group_ids)
            for group in self.attn_groups[gid]
            for layer in group.layer_names
        }

    def _configure_decode_metadata_update(self) -> None:
        """Past ``EagleSpeculator``'s own, which needs none at K = 1: here that is a graph like any other."""
        DraftModelSpeculator._configure_decode_metadata_update(self)

    def _turn_off_windowed_schedules(self) -> None:
        """FlashAttention's ahead-of-time schedule is wrong for a sliding-window drafter; vLLM's DFlash does the same.

        Ends when FlashAttention's builder looks at its own group's window.
        """
        for group in (group for groups in self.attn_groups for group in groups):
            builder = group.get_metadata_builder()
            if getattr(builder, "aot_schedule", False) and get_kv_cache_spec_sliding_window(builder.kv_cache_spec):
                builder.aot_schedule = False

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """One FULL graph for each decode shape, where the attention backend can refresh its metadata in it."""
        wanted = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        uniform = self.attn_cg_support.min_cg_support.value >= AttentionCGSupport.UNIFORM_BATCH.value
        possible = uniform and self.supports_decode_metadata_update
        if wanted and not possible:
            logger.warning(
                "P-EAGLE drafts run eagerly: the drafter's attention backend (%s) %s.",
                self.attn_cg_support.min_cg_attn_backend,
                "cannot refresh its metadata inside a CUDA graph" if uniform else "does not support full CUDA graphs",
            )
        mode = CUDAGraphMode.FULL_DECODE_ONLY if wanted and possible else CUDAGraphMode.NONE
        self.cudagraph_manager = DraftCudaGraphManager(self.vllm_config, self.device, mode)

    def capture(self) -> None:
        assert self.cudagraph_manager is not None
        self.cudagraph_manager.capture_drafts(self._prepare_capture)

    def _prepare_capture(self, desc: BatchExecutionDescriptor) -> Callable[[], None]:
        """A dummy batch of this shape in the buffers, and what the graph records: everything after ``expand``."""
        num_reqs, length = desc.num_reqs, desc.uniform_token_count
        assert num_reqs is not None and length is not None
        layout = self._static_layout(num_reqs, length)
        buffers = self.buffers
        starts = np.arange(num_reqs + 1, dtype=np.int32) * length
        buffers.query_start_loc[: num_reqs + 1].copy_(torch.from_numpy(starts))
        buffers.seq_lens.zero_()
        buffers.seq_lens[:num_reqs].fill_(length)
        buffers.input_ids.zero_()
        buffers.positions.zero_()
        buffers.row_map.fill_(geometry.PAD_ROW)
        buffers.slot_mappings.fill_(geometry.PAD_SLOT)
        buffers.sample_indices.zero_()
        buffers.sample_positions.zero_()
        buffers.sample_req.fill_(-1)  # sampling must not touch a live request
        across_dp = torch.full((self.dp_size,), desc.num_tokens, dtype=torch.int32) if self.dp_size > 1 else None
        batch = DraftBatch(
            layout=layout,
            samples_per_req=layout.samples_per_req(0),
            staging=self.staging[: 1 + layout.num_staging_rows],
            attn_metadata=self._attn_metadata(
                num_reqs, starts, self.block_tables.get_dummy_block_tables(num_reqs), capture=True
            ),
            num_tokens_across_dp=across_dp,
        )

        def draft() -> None:
            assert batch.attn_metadata is not None
            self._update_draft_decode_metadata(batch.attn_metadata, num_reqs)
            self._draft(batch)

        return draft

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
        assert aux_hidden_states, "P-EAGLE reads the target's auxiliary hidden states"
        assert num_sampled is not None and num_rejected is not None
        num_reqs = input_batch.num_reqs
        num_k = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        skip_attn = dummy_run and skip_attn_for_dummy_run

        num_scheduled = input_batch.num_scheduled_tokens[:num_reqs]
        length = self._static_length(num_scheduled, num_k)
        lengths = (
            np.full(num_reqs, length, dtype=np.int32)
            if length
            else geometry.ragged_lengths(num_scheduled, num_k, self._max_len).astype(np.int32)
        )
        starts = np.zeros(num_reqs + 1, dtype=np.int32)
        np.cumsum(lengths, out=starts[1:])
        num_rows = int(starts[-1])
        desc, sync = dispatch_cg_and_sync_dp(
            self.cudagraph_manager,
            num_reqs,
            num_rows,
            # Ranks that disagree on it, or of which one is ragged, all draft eagerly.
            uniform_token_count=length or None,
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
            need_eager=is_profile or skip_attn or self.cudagraph_manager is None,
        )
        replays = desc.cg_mode == CUDAGraphMode.FULL
        if not dummy_run:
            self.draft_stats.note("graph" if replays else "eager", num_rows, desc.num_tokens - num_rows)
        if length:
            num_reqs_padded = desc.num_reqs if replays else num_reqs
            assert num_reqs_padded is not None
            layout = self._static_layout(num_reqs_padded, length, desc.num_tokens)
            staging = self.staging[: 1 + layout.num_staging_rows]
            buffers = self.buffers
        else:
            layout = Layout(desc.num_tokens, num_reqs)
            # A prefill's staging is large and short-lived: memory that the target's own activations
            # need at another time anyway.
            staging = self.staging.new_empty(1 + input_batch.num_tokens, self.staging.shape[1])
            buffers = replace(self.buffers, staging=staging[1:])
            async_tensor_h2d(starts, device=self.device, out=buffers.query_start_loc[: num_reqs + 1])

        expand(
            TargetBatch(
                input_ids=input_batch.input_ids,
                positions=input_batch.positions,
                query_start_loc=input_batch.query_start_loc,
                num_rejected=num_rejected,
                num_sampled=num_sampled,
                idx_mapping=self.idx_mapping if dummy_run else input_batch.idx_mapping,
                last_sampled=last_sampled,
                next_prefill_tokens=next_prefill_tokens.view(-1),
                num_reqs=num_reqs,
                num_rows=input_batch.num_tokens,
                temperature=temperature,
                seeds=seeds,
            ),
            tuple(aux_hidden_states),
            KVGroups((), ()) if skip_attn else self._kv_groups(),
            layout,
            DraftStep(num_k, self._max_len, self.mask_token_id),
            buffers,
        )

        self._prepare_eplb_forward(num_rows)
        if replays:
            assert self.cudagraph_manager is not None
            self.cudagraph_manager.run_fullgraph(desc)
            return self.draft_tokens[:num_reqs]
        metadata = None
        if not skip_attn:
            bound = input_batch.seq_lens_cpu_upper_bound[:num_reqs].numpy()
            metadata = self._attn_metadata(
                num_reqs,
                starts,
                tuple(table[:num_reqs] for table in self.block_tables.input_block_tables),
                seq_lens_bound=geometry.seq_lens_bound(bound, lengths, num_k, self._max_len),
            )
        self._draft(
            DraftBatch(
                layout=layout,
                samples_per_req=layout.samples_per_req(num_k) if num_k else 0,
                staging=staging,
                attn_metadata=metadata,
                num_tokens_across_dp=None if sync is None else sync.num_tokens_across_dp,
            )
        )
        return self.draft_tokens[:num_reqs]

    def _static_length(self, num_scheduled: np.ndarray, num_k: int) -> int:
        """Rows a request of the static layout; 0 where the batch needs the ragged one.

        Args:
            num_scheduled: [num_reqs] verified rows, an upper bound under adaptive verification.
        """
        max_k, manager = self.num_speculative_steps, self.cudagraph_manager
        length = geometry.static_length(max_k, num_k) if manager is None else manager.static_length(num_k)
        decodes = num_scheduled.max() <= max_k + 1
        fits = length <= self._max_len and length * len(num_scheduled) <= self.max_num_tokens
        return length if decodes and fits else 0

    def _static_layout(self, num_reqs_padded: int, length: int, num_rows: int | None = None) -> Layout:
        num_rows = length * num_reqs_padded if num_rows is None else num_rows
        return Layout(num_rows, num_reqs_padded, static_length=length, staging_length=self.num_speculative_steps + 1)

    def _kv_groups(self) -> KVGroups:
        tables = self.block_tables
        return KVGroups(
            tuple(tables.input_block_tables[gid] for gid in self.draft_group_ids),
            tuple(tables.block_sizes[gid] for gid in self.draft_group_ids),
        )

    def _attn_metadata(
        self,
        num_reqs: int,
        starts: np.ndarray,
        block_tables: tuple[torch.Tensor, ...],
        seq_lens_bound: np.ndarray | None = None,
        capture: bool = False,
    ) -> dict[str, Any]:
        """vLLM's attention metadata of a draft batch, from host bounds and the buffers' lengths.

        Args:
            starts: [num_reqs + 1] int32 draft rows of each request.
            block_tables: for each KV group [num_reqs, max_blocks].
            seq_lens_bound: [num_reqs] upper bound of the sequence lengths; None: max_model_len.
        """
        num_rows = int(starts[-1])
        slot_mappings: list[torch.Tensor | None] = [None] * len(self.attn_groups)
        for row, gid in enumerate(self.draft_group_ids):
            slot_mappings[gid] = self.buffers.slot_mappings[row, :num_rows]
        bound = None if seq_lens_bound is None else seq_lens_bound.astype(np.int32)
        return build_attn_metadata(
            attn_groups=self.attn_groups,
            num_reqs=num_reqs,
            num_tokens=num_rows,
            query_start_loc_gpu=self.buffers.query_start_loc[: num_reqs + 1],
            query_start_loc_cpu=torch.from_numpy(starts),
            max_query_len=int((starts[1:] - starts[:-1]).max()),
            seq_lens=self.buffers.seq_lens[:num_reqs],
            max_seq_len=self._max_len if bound is None else int(bound.max()),
            block_tables=block_tables,
            slot_mappings=slot_mappings,  # indexed at draft groups only
            kv_cache_config=self.kv_cache_config,
            for_cudagraph_capture=capture,
            seq_lens_cpu_upper_bound=None if bound is None else torch.from_numpy(bound),
            positions=self.buffers.positions[:num_rows],
            is_prefilling=self.draft_is_prefilling[:num_reqs],
        )

    def _draft(self, batch: DraftBatch) -> None:
        """From the filled buffers to ``draft_tokens``. All of it is in the CUDA graph of a decode step.

        So it reads no Python number but those of ``batch``, and waits for nothing.
        """
        rows = slice(0, batch.layout.num_rows)
        # mask_hidden goes through fc as one more row: m follows every reload, sleep and dummy load by itself.
        batch.staging[0].copy_(self.model.mask_hidden.view(-1))
        combined = self.model.combine_hidden_states(batch.staging)
        broadcast(self.hidden_states[rows], combined[1:], combined[0], self.buffers.row_map[rows])
        hidden_states = self._forward(batch)
        if batch.samples_per_req:
            self._sample(batch, hidden_states)

    def _forward(self, batch: DraftBatch) -> torch.Tensor:
        """One drafter forward. Returns [num_rows, hidden_size] normed hidden states."""
        num_rows = batch.layout.num_rows
        slot_mapping = None
        if batch.attn_metadata is not None:
            slot_mapping = {layer: slots[:num_rows] for layer, slots in self.slot_mappings_by_layer.items()}
        with set_forward_context(
            batch.attn_metadata,
            self.vllm_config,
            num_tokens=num_rows,
            num_tokens_across_dp=batch.num_tokens_across_dp,
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

    def _sample(self, batch: DraftBatch, hidden_states: torch.Tensor) -> None:
        """Draft tokens from the sampled rows, into the first ``samples_per_req`` columns of ``draft_tokens``."""
        num_reqs, per_req = batch.layout.num_reqs_padded, batch.samples_per_req
        samples = slice(0, num_reqs * per_req)
        sampled = hidden_states[self.buffers.sample_indices[samples]]
        drafts = self.draft_tokens[:num_reqs, :per_req]
        if self.draft_logits is None and self.acceptance_estimator is None:
            top_tokens(self.model, sampled, out=drafts)
            return
        chosen = self.sample_draft(
            sampled,
            self.buffers.sample_positions[samples],
            self.buffers.sample_req[samples],
            self.temperature,
            self.seeds,
            self._columns[per_req][samples],
            self.draft_logits,
        )
        drafts.copy_(chosen.view(drafts.shape))
