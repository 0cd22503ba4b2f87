"""``ParallelEagleSpeculator``: P-EAGLE on Model Runner V2.

It is an ``EagleSpeculator`` whose ``propose`` builds a draft batch of its own instead of reusing
the target's: see docs/architecture.md for one batch walked through it. A decode step is one launch of
``prepare_inputs`` and one CUDA graph, which holds everything in ``_draft``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, has_compiled_submodule
from vllm.v1.worker.gpu.dp_utils import DPSyncState
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id
from vllm.v1.worker.utils import AttentionGroup

from peagle_kernels import (
    DraftStep,
    Drawing,
    KVGroups,
    Layout,
    TargetBatch,
    allocate_buffers,
    gather_hidden,
    geometry,
    prepare_inputs,
    walk_edges,
    walk_edges_triton,
)
from peagle_kernels.layout import seq_lens_bound
from peagle_vllm.draft_stats import DraftStats, Mode
from peagle_vllm.edge import find_candidates, load_edge, num_candidates
from peagle_vllm.greedy import top_tokens
from peagle_vllm.serving import check_loaded_head, own_windows
from peagle_vllm.v2.attention import DraftAttention, used_group_ids
from peagle_vllm.v2.cudagraph import NO_GRAPHS, DraftCudaGraphManager, draft_attention_config, draft_graphs
from peagle_vllm.v2.draw import draw
from peagle_vllm.v2.memory import draft_memory

logger = init_logger(__name__)

STEP_MODES: dict[CUDAGraphMode, Mode] = {
    CUDAGraphMode.FULL: "graph",
    CUDAGraphMode.PIECEWISE: "piecewise",
    CUDAGraphMode.NONE: "eager",
}


@dataclass(frozen=True)
class DraftBatch:
    """What one run of the drafter works on: shapes here, contents in the buffers.

    Attributes:
        layout: rows and requests, padding included.
        samples_per_req: rows to sample of each request.
        staging: [1 + staged rows, num_aux x target hidden]: room for ``mask_hidden``, then captured rows.
        hidden_states: [num_rows, hidden_size] room for the drafter's input rows.
        attn_metadata: the drafter's, by layer; None while memory is profiled.
        cudagraph_mode: PIECEWISE where the forward runs in captured pieces. A FULL graph is around all of this.
    """

    layout: Layout
    samples_per_req: int
    staging: torch.Tensor
    hidden_states: torch.Tensor
    attn_metadata: dict[str, Any] | None
    cudagraph_mode: CUDAGraphMode = CUDAGraphMode.NONE


class ParallelEagleSpeculator(EagleSpeculator):
    """Drafts all K tokens of every request in one drafter forward."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        super().__init__(vllm_config, device)
        # The runner leaves room for these rows when it sizes its dummy batches.
        self.num_query_per_req = self.num_speculative_steps
        self.num_extra_query_per_req = self.num_speculative_steps - 1
        self.parallel_drafting_token_id = get_parallel_drafting_token_id(self.draft_model_config.hf_config)

        # A draft batch has K-1 more rows a request than the target's, and vLLM's warm-up fills the
        # target's batch up to max_num_batched_tokens, so the inherited buffers are too short.
        self.max_draft_rows = self.max_num_tokens + self.max_num_reqs * self.num_extra_query_per_req
        self.input_buffers = InputBuffers(self.max_num_reqs, self.max_draft_rows, device)
        # Draft columns of a batch that samples s rows a request: 0 .. s-1, again and again.
        self._columns = {
            samples: torch.arange(samples, dtype=torch.int32, device=device).repeat(self.max_num_reqs)
            for samples in range(1, self.num_speculative_steps + 1)
        }
        self.idx_mapping.fill_(-1)  # a dummy batch's requests: they own no blocks and sample nothing
        candidates = self.max_num_reqs, self.num_speculative_steps, num_candidates(vllm_config)
        self._scores = torch.zeros(candidates, dtype=torch.float32, device=device)
        # Which entries of draft_logits are finite: made with it, lost with it.
        self._cached_ids = torch.zeros(candidates, dtype=torch.int64, device=device)
        self.cudagraph_manager: DraftCudaGraphManager | None = None
        self.draft_stats = DraftStats()

    @property
    def _max_len(self) -> int:
        """``max_model_len`` now: vLLM can shrink it to what fits in memory after this speculator is built."""
        return self.vllm_config.model_config.max_model_len

    def load_model(self, target_model: torch.nn.Module) -> None:
        with own_windows(self.vllm_config):
            super().load_model(target_model)
        # The mask rows have no multimodal embedding; text drafts stay exact for text.
        self.supports_mm_inputs = False
        check_loaded_head(self.model, self.vllm_config)
        self.edge = load_edge(self.model, self.vllm_config, self.device)
        self._allocate_buffers()

    def draft_logits_spec(self, vllm_config: VllmConfig) -> tuple[torch.dtype, float]:
        """As inherited; a walk writes its candidates' scores only, in the float32 that it chose by."""
        return (torch.float32, -float("inf")) if num_candidates(vllm_config) else super().draft_logits_spec(vllm_config)

    def _allocate_buffers(self) -> None:
        """Draft buffers whose inputs to the model are the inherited ones. Slots follow in ``set_attn``."""
        # Persistent buffers fit the largest graph. Larger batches allocate theirs for one step, out of the memory that
        # the target's activations use at another time.
        graphs = draft_graphs(self.vllm_config, self.vllm_config.compilation_config.cudagraph_mode)
        options = {"dtype": self.dtype, "device": self.device}
        self.hidden_states = torch.zeros(graphs.max_rows, self.hidden_size, **options)
        # Row 0 is mask_hidden's, a static batch's compact rows follow.
        staging_rows = 1 + graphs.max_num_reqs * (self.num_speculative_steps + 1)
        self.staging = torch.zeros(staging_rows, self.model.mask_hidden.numel(), **options)
        inputs = self.input_buffers
        self.buffers = allocate_buffers(
            max_rows=self.max_draft_rows,
            max_num_reqs=self.max_num_reqs,
            max_speculative_tokens=self.num_speculative_steps,
            staging=self.staging[1:],
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
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
        # BlockTables.slot_mappings belongs to the target's graph and is too narrow for a draft batch.
        slots = (len(used_group_ids(self.attn_groups)), self.max_draft_rows)
        self.buffers = self.buffers._replace(
            slot_mappings=torch.full(slots, geometry.PAD_SLOT, dtype=torch.int64, device=self.device)
        )
        self.attention = DraftAttention(
            self.vllm_config,
            self.attn_groups,
            kv_cache_config,
            block_tables,
            self.buffers,
            self.draft_is_prefilling,
        )

    def _configure_decode_metadata_update(self) -> None:
        """``EagleSpeculator`` skips this at K = 1, where it has no second draft step; here K = 1 has a graph, too."""
        DraftModelSpeculator._configure_decode_metadata_update(self)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """FULL graphs of decode batches and PIECEWISE ones of the others, as far as the drafter can have them."""
        # vLLM can resolve another mode than the one that the buffers were made for.
        max_num_reqs = (len(self.staging) - 1) // (self.num_speculative_steps + 1)
        shapes = draft_graphs(self.vllm_config, cudagraph_mode).within(len(self.hidden_states), max_num_reqs)
        if shapes.decode and self.attn_cg_support.min_cg_support.value < AttentionCGSupport.UNIFORM_BATCH.value:
            logger.warning(
                "P-EAGLE drafts without a full CUDA graph: the drafter's attention backend (%s) does not support one.",
                self.attn_cg_support.min_cg_attn_backend,
            )
            shapes = replace(shapes, decode=())
        if shapes.mixed and not (is_breakable_cudagraph_enabled() or has_compiled_submodule(self.model)):
            shapes = replace(shapes, mixed=())
        if shapes.decode and shapes.max_num_reqs < self.max_num_reqs:
            logger.info(
                "P-EAGLE decode batches of more than %d requests draft without a full CUDA graph: of %d rows a request "
                "max_num_batched_tokens (%d) holds no more.",
                shapes.max_num_reqs,
                geometry.static_length(self.num_speculative_steps, self.num_speculative_steps),
                self.max_num_tokens,
            )
        self.cudagraph_manager = DraftCudaGraphManager(self.vllm_config, self.device, shapes)

    def capture(self) -> None:
        manager = self.cudagraph_manager
        assert manager is not None
        if manager.use_breakable_cg:
            manager.init_breakable_cg_runner(self.model)
        manager.capture_drafts(self._prepare_capture)

    def sizes(self) -> dict[str, int]:
        """What drafting holds once it is set up: captured graphs, and bytes of buffers beside them."""
        captured = self.cudagraph_manager.captured if self.cudagraph_manager else NO_GRAPHS
        return {
            "graphs": len(captured.decode) + len(captured.mixed),
            "buffer_bytes": draft_memory(self.vllm_config, len(used_group_ids(self.attn_groups))).buffers,
        }

    def _prepare_capture(self, desc: BatchExecutionDescriptor) -> Callable[[CUDAGraphMode], None]:
        """A dummy batch of this shape in the buffers, and what its graph records.

        A FULL graph records everything after ``prepare_inputs``, a PIECEWISE one the drafter's forward.
        """
        if desc.cg_mode == CUDAGraphMode.FULL:
            assert desc.num_reqs is not None and desc.uniform_token_count is not None
            num_reqs, length = desc.num_reqs, desc.uniform_token_count
            starts = np.arange(num_reqs + 1, dtype=np.int32) * length
            layout = Layout(desc.num_tokens, num_reqs, length, self.num_speculative_steps + 1)
        else:
            num_reqs = min(desc.num_tokens, self.max_num_reqs)
            starts = np.linspace(0, desc.num_tokens, num_reqs + 1).astype(np.int32)
            layout = Layout(desc.num_tokens, num_reqs)
        self._fill_dummy(starts)
        self.block_tables.get_dummy_block_tables(num_reqs)  # zeroes the tables that metadata reads
        is_full = desc.cg_mode == CUDAGraphMode.FULL
        batch = DraftBatch(
            layout=layout,
            samples_per_req=layout.samples_per_req(0),
            staging=self.staging[: 1 + layout.num_staging_rows],
            hidden_states=self.hidden_states[: layout.num_rows],
            attn_metadata=self.attention.metadata(
                num_reqs, starts, seq_lens_bound=None if is_full else np.diff(starts), capture=is_full
            ),
        )

        def record(mode: CUDAGraphMode) -> None:
            if is_full:
                self._refresh_and_draft(batch)
            else:
                self._forward(replace(batch, cudagraph_mode=mode))

        return record

    def _fill_dummy(self, starts: np.ndarray) -> None:
        """A batch of these starts that computes and touches nothing: no KV, no live request."""
        num_reqs, buffers = len(starts) - 1, self.buffers
        buffers.query_start_loc[: num_reqs + 1].copy_(torch.from_numpy(starts))
        buffers.seq_lens.zero_()
        buffers.seq_lens[:num_reqs].copy_(torch.from_numpy(np.diff(starts)))
        buffers.input_ids.zero_()
        buffers.positions.zero_()
        buffers.row_map.fill_(geometry.PAD_ROW)
        buffers.slot_mappings.fill_(geometry.PAD_SLOT)
        buffers.sample_indices.zero_()
        buffers.sample_pos.zero_()
        buffers.sample_idx_mapping.fill_(-1)

    def _refresh_and_draft(self, batch: DraftBatch) -> None:
        """What a FULL graph holds. Where a backend cannot refresh its metadata here, ``propose`` builds it anew."""
        assert batch.attn_metadata is not None
        num_reqs = batch.layout.num_reqs_padded
        if self.supports_decode_metadata_update:
            self.attention.map_kernel_block_tables(num_reqs)
            self._update_draft_decode_metadata(batch.attn_metadata, num_reqs)
        self._draft(batch)

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

        manager = None if is_profile or skip_attn else self.cudagraph_manager
        run = (manager.captured if manager else NO_GRAPHS).dispatch(
            input_batch.num_scheduled_tokens[:num_reqs],
            num_k,
            max_k=self.num_speculative_steps,
            max_num_tokens=self.max_num_tokens,
            max_model_len=self._max_len,
        )
        mode = CUDAGraphMode.NONE if run.graph is None else run.graph.cg_mode
        layout, buffers = run.layout, self.buffers
        if not dummy_run:
            self.draft_stats.note(STEP_MODES[mode], run.num_rows, layout.num_rows - run.num_rows)
        if mode != CUDAGraphMode.FULL:
            num_staging_rows = layout.num_staging_rows if layout.static_length else input_batch.num_tokens
            staging = _first_rows(self.staging, 1 + num_staging_rows)
            buffers = buffers._replace(staging=staging[1:])
        if not layout.static_length:
            async_tensor_h2d(run.starts, device=self.device, out=buffers.query_start_loc[: num_reqs + 1])

        prepare_inputs(
            TargetBatch(
                input_ids=input_batch.input_ids,
                positions=input_batch.positions,
                query_start_loc=input_batch.query_start_loc,
                num_rejected=num_rejected,
                num_sampled=num_sampled,
                idx_mapping=self.idx_mapping if dummy_run else input_batch.idx_mapping,
                last_sampled=last_sampled,
                next_prefill_tokens=next_prefill_tokens.view(-1),
                temperature=temperature,
                seeds=seeds,
            ),
            tuple(aux_hidden_states),
            KVGroups((), ()) if skip_attn else self.attention.kv_groups,
            layout,
            DraftStep(num_reqs, input_batch.num_tokens, num_k, self._max_len, self.parallel_drafting_token_id),
            buffers,
        )

        self._prepare_eplb_forward(run.num_rows)
        metadata = None
        if not skip_attn and not (mode == CUDAGraphMode.FULL and self.supports_decode_metadata_update):
            bound = input_batch.seq_lens_cpu_upper_bound[:num_reqs].numpy()
            metadata = self.attention.metadata(
                layout.num_reqs_padded,
                run.starts,
                # In a FULL graph num_rows includes the rows of padding requests.
                num_rows=layout.num_rows if mode == CUDAGraphMode.FULL else None,
                seq_lens_bound=seq_lens_bound(bound, np.diff(run.starts), num_k, self._max_len),
            )
        if mode == CUDAGraphMode.FULL:
            assert manager is not None and run.graph is not None
            manager.run_fullgraph(run.graph)
            return self.draft_tokens[:num_reqs]
        self._draft(
            DraftBatch(
                layout=layout,
                samples_per_req=layout.samples_per_req(num_k) if num_k else 0,
                staging=staging,
                hidden_states=_first_rows(self.hidden_states, layout.num_rows),
                attn_metadata=metadata,
                cudagraph_mode=mode,
            )
        )
        return self.draft_tokens[:num_reqs]

    def _draft(self, batch: DraftBatch) -> None:
        """From the filled buffers to ``draft_tokens``. All of it is in the CUDA graph of a decode step.

        So it reads no Python number but those of ``batch``, and waits for nothing.
        """
        rows = slice(0, batch.layout.num_rows)
        # mask_hidden goes through fc as one more row: m follows every reload, sleep and dummy load by itself.
        batch.staging[0].copy_(self.model.mask_hidden.view(-1))
        combined = self.model.combine_hidden_states(batch.staging)
        gather_hidden(batch.hidden_states, combined[1:], combined[0], self.buffers.row_map[rows])
        hidden_states = self._forward(batch)
        if batch.samples_per_req:
            self._sample(batch, hidden_states)

    def _forward(self, batch: DraftBatch) -> torch.Tensor:
        """One drafter forward. Returns [num_rows, hidden_size] normed hidden states."""
        num_rows = batch.layout.num_rows
        inputs = {
            "input_ids": self.buffers.input_ids[:num_rows],
            "positions": self.buffers.positions[:num_rows],
            "hidden_states": batch.hidden_states,
            "inputs_embeds": None,
        }
        with set_forward_context(
            batch.attn_metadata,
            self.vllm_config,
            num_tokens=num_rows,
            cudagraph_runtime_mode=batch.cudagraph_mode,
            # A head is dense, so any row counts will do for the other ranks. Without them vLLM runs a collective.
            num_tokens_across_dp=torch.full((self.dp_size,), num_rows, dtype=torch.int32) if self.dp_size > 1 else None,
            slot_mapping=None if batch.attn_metadata is None else self.attention.slot_mapping(num_rows),
            batch_descriptor=BatchDescriptor(num_tokens=num_rows),
            # vLLM compiles heads for at most max_num_batched_tokens rows; only its warm-up, which
            # ignores the draft slots, makes larger batches.
            skip_compiled=num_rows > self.max_num_tokens,
        ):
            if batch.cudagraph_mode == CUDAGraphMode.PIECEWISE:
                assert self.cudagraph_manager is not None
                hidden_states, _ = self.cudagraph_manager.run_pw_graph(self.model, inputs)
            else:
                hidden_states, _ = self.model(**inputs)
        return hidden_states

    def _sample(self, batch: DraftBatch, hidden_states: torch.Tensor) -> None:
        """Draft tokens from the sampled rows, into the first ``samples_per_req`` columns of ``draft_tokens``."""
        num_reqs, per_req = batch.layout.num_reqs_padded, batch.samples_per_req
        samples = slice(0, num_reqs * per_req)
        sampled = hidden_states[self.buffers.sample_indices[samples]]
        drafts = self.draft_tokens[:num_reqs, :per_req]
        if self.edge:
            self._walk(sampled, samples, drafts)
            return
        if self.draft_logits is None and self.acceptance_estimator is None:
            top_tokens(self.model, sampled, out=drafts)
            return
        chosen = self.sample_draft(
            sampled,
            self.buffers.sample_pos[samples],
            self.buffers.sample_idx_mapping[samples],
            self.temperature,
            self.seeds,
            self._columns[per_req][samples],
            self.draft_logits,
        )
        drafts.copy_(chosen.view(drafts.shape))

    def _walk(self, sampled: torch.Tensor, samples: slice, drafts: torch.Tensor) -> None:
        """``_sample`` of a sharpened head: each token is chosen knowing the one before it."""
        assert self.edge is not None
        buffers = self.buffers
        idx_mapping = buffers.sample_idx_mapping[samples]
        candidates = find_candidates(self.model, self.edge, sampled, buffers.input_ids, buffers.sample_indices[samples])
        scores = self._scores.view(-1, self.edge.num_candidates)[samples]
        walk = candidates, self.edge, self.model.draft_id_to_target_id, scores
        if self.draft_logits is None:
            walk_edges(drafts, *walk)
        else:
            positions = buffers.sample_pos[samples]
            state = self.temperature, self.seeds, self.draft_logits, self._cached_ids
            walk_edges_triton(drafts, *walk, Drawing(draw, idx_mapping, positions, *state, self.use_fp64_gumbel))
        self._maybe_predict_acceptance(scores, idx_mapping, self._columns[drafts.shape[1]][samples])


def _first_rows(buffer: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The first rows of a buffer of graphs, or as many of memory that lives for this step."""
    return buffer[:num_rows] if num_rows <= len(buffer) else buffer.new_empty(num_rows, buffer.shape[1])
