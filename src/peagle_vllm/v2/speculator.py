"""``ParallelEagleSpeculator``: P-EAGLE on Model Runner V2.

An ``EagleSpeculator`` whose ``propose`` builds a draft batch of its own: docs/architecture.md walks one through it. The
draft step of a decode batch is one launch of ``prepare_inputs`` and a graph that holds everything in ``_draft``.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, has_compiled_submodule
from vllm.v1.worker.gpu.dp_utils import DPSyncState
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id
from vllm.v1.worker.gpu.states import RequestState

from peagle_kernels import geometry
from peagle_kernels.batch import KVGroups, TargetBatch, allocate_buffers
from peagle_kernels.gather_hidden import gather_hidden
from peagle_kernels.layout import DraftBatch, seq_lens_bound
from peagle_kernels.lookup_drafts import OneHot, lookup_drafts
from peagle_kernels.prepare_inputs import prepare_inputs
from peagle_kernels.select_candidates import Drawing
from peagle_vllm.draft_log import log_start
from peagle_vllm.kv_groups import keep_windows_whole, own_cache_settings, warn_of_split
from peagle_vllm.lookup import prompt_lookup_min
from peagle_vllm.observer import Observer, sampled_rows
from peagle_vllm.sampling.greedy import top_tokens
from peagle_vllm.sampling.selection import load_selector, num_candidates, plain_selector, select
from peagle_vllm.serving import check_loaded_head
from peagle_vllm.updates import HeadUpdates
from peagle_vllm.v2.attention import DraftAttention, draft_attention_config, share_workspace, split_blocks, whole_kv
from peagle_vllm.v2.cudagraph import NO_GRAPHS, DraftCudaGraphManager, draft_graphs, supported
from peagle_vllm.v2.draft_run import DraftRun, dummy_run, first_rows
from peagle_vllm.v2.drawing import draw, with_others


class ParallelEagleSpeculator(EagleSpeculator):
    """Drafts all K tokens of every request in one drafter forward."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState):
        super().__init__(whole_kv(vllm_config), device)
        # The runner's dummy batches then have no more requests than the scheduler admits. num_extra_query_per_req stays
        # 0: the runner takes those rows off the target's batch, and would size the KV cache after too small a peak.
        self.num_query_per_req = self.num_speculative_steps
        self.parallel_drafting_token_id = get_parallel_drafting_token_id(self.draft_model_config.hf_config)
        self.idx_mapping.fill_(-1)  # a dummy batch's requests: they own no blocks and sample nothing
        shape = self.max_num_reqs, self.num_speculative_steps, num_candidates(vllm_config)
        self.scores = torch.zeros(shape, dtype=torch.float32, device=device)  # what the last tokens were chosen by
        # Which entries of ``draft_logits`` may be finite; discarded with it.
        self.cached_ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self.sampling_states: SamplingStates  # of the runner's sampler; the patch v2-speculator sets it
        self.prompt_lookup_min = prompt_lookup_min(vllm_config)
        if self.prompt_lookup_min:
            self.token_ids = req_states.all_token_ids.gpu  # on the device: the patch v2-speculator puts them there
        self.cudagraph_manager: DraftCudaGraphManager | None = None
        self.observer: Observer | None = None
        self._req_ids: list[str] = []

    @property
    def _max_len(self) -> int:
        """``max_model_len`` now: vLLM can shrink it to what fits in memory after this speculator is built."""
        return self.vllm_config.model_config.max_model_len

    def load_model(self, target_model: torch.nn.Module) -> None:
        with own_cache_settings(self.vllm_config):
            super().load_model(target_model)
        keep_windows_whole(self.model, self.vllm_config)
        # The mask rows have no multimodal embedding; text drafts stay exact for text.
        self.supports_mm_inputs = False
        check_loaded_head(self.model, self.vllm_config)
        loaded = self.model, self.vllm_config
        selector = load_selector(*loaded, self.device)
        self.selector = selector or plain_selector(*loaded, self.device)  # None: drafts are the best tokens
        self.updates = HeadUpdates(self.model, target_model, selector, self.vllm_config)
        self._allocate_buffers()

    def draft_logits_spec(self, vllm_config: VllmConfig) -> tuple[torch.dtype, float]:
        """Only candidates are written: their scores, below the best one's."""
        return super().draft_logits_spec(vllm_config)[0], -float("inf")

    def _allocate_buffers(self) -> None:
        """Draft buffers whose inputs to the model are the inherited ones. Slots follow in ``set_attn``."""
        # Persistent buffers fit the largest graph. Larger batches allocate theirs for one step, out of the memory that
        # the target's activations use at another time.
        graphs = draft_graphs(self.vllm_config, self.vllm_config.compilation_config.cudagraph_mode)
        options = {"dtype": self.dtype, "device": self.device}
        self.hidden_states = torch.zeros(graphs.max_rows, self.hidden_size, **options)
        # Row 0 is mask_hidden's, staging follows: a static batch's compact rows.
        self.fc_inputs = torch.zeros(1 + graphs.max_staging_rows, self.model.mask_hidden.numel(), **options)
        inputs = self.input_buffers
        self.buffers = allocate_buffers(
            max_rows=self.max_num_tokens,
            max_num_reqs=self.max_num_reqs,
            max_speculative_tokens=self.num_speculative_steps,
            staging=self.fc_inputs[1:],
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

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)
        warn_of_split(self.model, self.vllm_config, self.kv_cache_config)
        split_blocks(self.attn_groups, self.target_attn_groups, self.attn_vllm_config, self.device)
        share_workspace(self.attn_groups, self.target_attn_groups)
        # BlockTables.slot_mappings belongs to the target's graph and is too narrow for a draft batch.
        slots = sum(map(bool, self.attn_groups)), self.max_num_tokens
        self.buffers = self.buffers._replace(
            slot_mappings=torch.full(slots, geometry.PAD_SLOT, dtype=torch.int64, device=self.device)
        )
        self.attention = DraftAttention(
            self.vllm_config,
            self.attn_groups,
            self.kv_cache_config,
            self.block_tables,
            self.buffers,
            self.draft_is_prefilling,
        )

    def _configure_decode_metadata_update(self) -> None:
        """``EagleSpeculator`` skips this at K = 1, where it has no second draft step; here K = 1 has a graph, too."""
        DraftModelSpeculator._configure_decode_metadata_update(self)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """FULL graphs of decode batches and PIECEWISE ones of the others, as far as the drafter can have them."""
        # vLLM can resolve another mode than the one that the buffers were made for.
        shapes = draft_graphs(self.vllm_config, cudagraph_mode)
        shapes = shapes.within(len(self.hidden_states), len(self.fc_inputs) - 1)
        has_pieces = is_breakable_cudagraph_enabled() or has_compiled_submodule(self.model)
        shapes = supported(shapes, self.attn_cg_support, has_pieces)
        self.cudagraph_manager = DraftCudaGraphManager(self.vllm_config, self.device, shapes)
        log_start(self, self.kv_cache_config, num_graphs=len(shapes.decode) + len(shapes.mixed))

    def capture(self) -> None:
        manager = self.cudagraph_manager
        assert manager is not None
        if manager.use_breakable_cg:
            manager.init_breakable_cg_runner(self.model)
        manager.capture(lambda desc, warmup: self._prepare_capture(desc), "Capturing P-EAGLE draft CUDA graphs")

    def _prepare_capture(self, desc: BatchExecutionDescriptor) -> Callable[[CUDAGraphMode], None]:
        """A dummy run of this shape in the buffers, and what its graph records.

        A FULL graph records everything after ``prepare_inputs``, a PIECEWISE one the drafter's forward.
        """
        run = dummy_run(desc, self.fc_inputs, self.hidden_states, self.attention)

        def record(mode: CUDAGraphMode) -> None:
            if desc.cg_mode == CUDAGraphMode.FULL:
                self._refresh_and_draft(run)
            else:
                self._forward(replace(run, cudagraph_mode=mode))

        return record

    def _refresh_and_draft(self, run: DraftRun) -> None:
        """What a FULL graph holds. Where a backend cannot refresh its metadata here, ``propose`` builds it."""
        assert run.attn_metadata is not None
        num_reqs = run.batch.num_reqs_padded
        if self.supports_decode_metadata_update:
            self.attention.map_kernel_block_tables(num_reqs)
            self._update_draft_decode_metadata(run.attn_metadata, num_reqs)
        self._draft(run)

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
        last_sampled: torch.Tensor,  # [max_num_reqs, 1]
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
        num_reqs, self._req_ids = input_batch.num_reqs, input_batch.req_ids
        if self.updates.paused:
            return self._draft_nothing(num_reqs, None if dummy_run else input_batch.idx_mapping)
        num_k = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        skip_attn = dummy_run and skip_attn_for_dummy_run

        manager = None if is_profile or skip_attn else self.cudagraph_manager
        batch, starts, graph = (manager.captured if manager else NO_GRAPHS).dispatch(
            input_batch.num_scheduled_tokens[:num_reqs],
            input_batch.num_tokens,
            num_k,
            max_k=self.num_speculative_steps,
            max_num_tokens=self.max_num_tokens,
            max_model_len=self._max_len,
        )
        mode, buffers = graph.cg_mode if graph else CUDAGraphMode.NONE, self.buffers
        if mode != CUDAGraphMode.FULL:
            fc_inputs = first_rows(self.fc_inputs, 1 + batch.num_staging_rows)
            buffers = buffers._replace(staging=fc_inputs[1:])
        if not batch.static_length:
            async_tensor_h2d(starts, device=self.device, out=buffers.query_start_loc[: num_reqs + 1])

        states = self.sampling_states
        sampling = {"temperature": temperature, "seeds": seeds, "top_k": states.top_k.gpu, "top_p": states.top_p.gpu}
        if self.draft_logits is None and not self.enable_adaptive_verification:
            # Greedy drafts read none of these, and vLLM's are in the host's memory.
            sampling = {name: getattr(buffers, name) for name in sampling}
        prepare_inputs(
            TargetBatch(
                input_ids=input_batch.input_ids,
                positions=input_batch.positions,
                query_start_loc=input_batch.query_start_loc,
                num_rejected=num_rejected,
                num_sampled=num_sampled,
                idx_mapping=self.idx_mapping if dummy_run else input_batch.idx_mapping,
                last_sampled=last_sampled.view(-1),
                next_prefill_tokens=next_prefill_tokens.view(-1),
                **sampling,
            ),
            tuple(aux_hidden_states),
            KVGroups((), ()) if skip_attn else self.attention.kv_groups,
            batch,
            buffers,
            max_model_len=self._max_len,
            parallel_drafting_token_id=self.parallel_drafting_token_id,
        )

        metadata = None
        if not skip_attn and not (mode == CUDAGraphMode.FULL and self.supports_decode_metadata_update):
            bound = input_batch.seq_lens_cpu_upper_bound[:num_reqs].numpy()
            metadata = self.attention.metadata(
                batch.num_reqs_padded,
                starts,
                # In a FULL graph num_rows includes the rows of padding requests.
                num_rows=batch.num_rows if mode == CUDAGraphMode.FULL else None,
                seq_lens_bound=seq_lens_bound(bound, np.diff(starts), num_k, self._max_len),
            )
        if mode == CUDAGraphMode.FULL:
            assert manager is not None and graph is not None
            manager.run_fullgraph(graph)
            return self.draft_tokens[:num_reqs]
        hidden_states = first_rows(self.hidden_states, batch.num_rows)
        self._draft(DraftRun(batch, fc_inputs, hidden_states, metadata, mode))
        return self.draft_tokens[:num_reqs]

    def _draft_nothing(self, num_reqs: int, rows: torch.Tensor | None) -> torch.Tensor:
        """[num_reqs, K_max] zeros, each one-hot in the batch's ``rows``, while the head's weights are not whole."""
        if self.draft_logits is not None and rows is not None:
            self.draft_logits[rows] = -float("inf")
            self.draft_logits[rows, :, 0] = 0
            self.cached_ids[rows] = 0
        return self.draft_tokens[:num_reqs].zero_()

    def _draft(self, run: DraftRun) -> None:
        """From the filled buffers to ``draft_tokens``. All of it is in the CUDA graph of a decode step.

        So it reads no Python number but those of ``run``, and waits for nothing.
        """
        # mask_hidden goes through fc as one more row: m follows every reload, sleep and dummy load by itself.
        run.fc_inputs[0].copy_(self.model.mask_hidden.view(-1))
        combined = self.model.combine_hidden_states(run.fc_inputs)
        gather_hidden(run.hidden_states, combined[1:], combined[0], self.buffers.row_map[: run.batch.num_rows])
        hidden_states = self._forward(run)
        if run.batch.num_speculative_tokens:
            self._sample(run.batch, hidden_states)

    def _forward(self, run: DraftRun) -> torch.Tensor:
        """One drafter forward. Returns [num_rows, hidden_size] normed hidden states."""
        num_rows, dp_size = run.batch.num_rows, self.vllm_config.parallel_config.data_parallel_size  # which can change
        inputs = {
            "input_ids": self.buffers.input_ids[:num_rows],
            "positions": self.buffers.positions[:num_rows],
            "hidden_states": run.hidden_states,
            "inputs_embeds": None,
        }
        with set_forward_context(
            run.attn_metadata,
            self.vllm_config,
            num_tokens=num_rows,
            cudagraph_runtime_mode=run.cudagraph_mode,
            # A head is dense, so any row counts will do for the other ranks. Without them vLLM runs a collective.
            num_tokens_across_dp=torch.full((dp_size,), num_rows, dtype=torch.int32) if dp_size > 1 else None,
            slot_mapping=None if run.attn_metadata is None else self.attention.slot_mapping(num_rows),
            batch_descriptor=BatchDescriptor(num_tokens=num_rows),
        ):
            if run.cudagraph_mode == CUDAGraphMode.PIECEWISE:
                assert self.cudagraph_manager is not None
                hidden_states, _ = self.cudagraph_manager.run_pw_graph(self.model, inputs)
            else:
                hidden_states, _ = self.model(**inputs)
        return hidden_states

    def _sample(self, batch: DraftBatch, hidden_states: torch.Tensor) -> None:
        """Draft tokens, into the first ``samples_per_req`` columns of ``draft_tokens``."""
        num_reqs, per_req = batch.num_reqs_padded, batch.samples_per_req
        drafts = self.draft_tokens[:num_reqs, :per_req]
        self._choose(drafts, hidden_states)
        if not self.prompt_lookup_min:
            return
        first = slice(0, num_reqs * per_req, per_req)
        rows, one_hot = self.buffers.sample_idx_mapping[first], None
        if self.draft_logits is not None:
            one_hot = OneHot(self.draft_logits, rows, -float("inf"), 0.0, self.cached_ids)
        last, vocab_size = self.buffers.sample_pos[first], self.vllm_config.model_config.get_vocab_size()
        lookup_drafts(drafts, self.token_ids, rows, last, self.prompt_lookup_min, vocab_size, one_hot)

    def _choose(self, drafts: torch.Tensor, hidden_states: torch.Tensor) -> None:
        """The head's draft tokens, [num_reqs, samples_per_req], from the sampled rows."""
        buffers, per_req = self.buffers, drafts.shape[1]
        samples = slice(0, drafts.numel())
        sampled = hidden_states[buffers.sample_indices[samples]]
        positions, idx_mapping = buffers.sample_pos[samples], buffers.sample_idx_mapping[samples]
        if self.observer:
            self.observer(sampled_rows(self._req_ids, per_req, positions, sampled))
        if self.selector is None:
            top_tokens(self.model, sampled, out=drafts)
            return
        scores, drawing = self.scores.view(-1, self.selector.num_candidates)[samples], None
        if self.draft_logits is not None:
            sampling = buffers.temperature, buffers.seeds, buffers.top_k, buffers.top_p
            kept = self.draft_logits, self.cached_ids
            drawing = Drawing(draw, idx_mapping, positions, *sampling, *kept, self.use_fp64_gumbel)
        estimator = self.acceptance_estimator
        candidates = select(
            self.model, self.selector, sampled, buffers, drafts, scores, drawing, log_probs=estimator is not None
        )
        if estimator is not None:
            # It finds a sample's request by dividing by its number of steps, which is K; a step may want fewer drafts.
            estimator.num_speculative_steps = per_req
            chosen_by = with_others(scores, candidates.logits)
            columns = torch.arange(per_req, dtype=torch.int32, device=self.device).repeat(len(drafts))
            self._maybe_predict_acceptance(chosen_by, idx_mapping, columns)
            estimator.num_speculative_steps = self.num_speculative_steps
