"""``ParallelEagleProposer``: P-EAGLE on the V1 model runner.

An ``EagleProposer`` that builds its draft batch with ``prepare_inputs`` and ``gather_hidden``; the forward is vLLM's.
"""

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch, sample_with_exponential_noise
from vllm.v1.sample.sampler import _SAMPLING_EPS
from vllm.v1.spec_decode.eagle import EagleProposer

from peagle_kernels.batch import KVGroups, TargetBatch, allocate_buffers
from peagle_kernels.gather_hidden import gather_hidden
from peagle_kernels.layout import DraftBatch, ragged_lengths, seq_lens_bound, starts_of
from peagle_kernels.lookup_drafts import OneHot, lookup_drafts
from peagle_kernels.prepare_inputs import prepare_inputs
from peagle_vllm.draft_log import log_start
from peagle_vllm.kv_groups import keep_windows_whole, own_cache_settings, warn_of_split, with_draft_model
from peagle_vllm.lookup import prompt_lookup_min
from peagle_vllm.observer import Observer, sampled_rows
from peagle_vllm.sampling.greedy import top_candidates, top_tokens
from peagle_vllm.sampling.selection import load_selector, plain_selector, select
from peagle_vllm.serving import RefusedError, check_loaded_head
from peagle_vllm.updates import HeadUpdates
from peagle_vllm.v1.history import TokenHistory, token_indices

# In place of a request: vLLM asks each for a token that is then overwritten, and a prompt of embeddings raises.
_NO_TOKENS = SimpleNamespace(get_token_id=lambda _: 0)
USE_V2 = "on a GPU use Model Runner V2 (VLLM_USE_V2_MODEL_RUNNER=1)"


class ParallelEagleProposer(EagleProposer):
    """Drafts all K tokens of every request in one drafter forward."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None):
        draft = vllm_config.speculative_config.draft_model_config
        kinds = sorted(set(draft.hf_config.layer_types or ()))
        if len(kinds) > 1:  # vLLM's V1 runner keeps one attention metadata for all of a head's layers
            what = f"layer_types names {' and '.join(kinds)} layers, and the V1 model runner drafts with one kind only"
            raise RefusedError(f"{what}: {draft.model}/config.json; {USE_V2}")
        super().__init__(vllm_config, device, runner)
        self.runner = runner
        # Filled where the inherited forward reads. The runner hands captured hidden states over side by side.
        self.buffers = allocate_buffers(
            max_rows=self.max_num_tokens,
            max_num_reqs=self.max_batch_size,
            max_speculative_tokens=self.num_speculative_tokens,
            staging=torch.zeros(0, 0, dtype=self.dtype, device=device),
            input_ids=self.input_ids,
            positions=self.positions,
            slot_mappings=self._slot_mapping_buffer[None],
        )
        self._row_of_req = torch.arange(self.max_batch_size, dtype=torch.int64, device=device)
        self._ones = torch.ones(self.max_batch_size, dtype=torch.int32, device=device)
        self._none_rejected = torch.zeros(self.max_batch_size, dtype=torch.int32, device=device)
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        self.prompt_lookup_min = prompt_lookup_min(vllm_config)
        self.history = TokenHistory(self.max_batch_size, self._max_len, device) if self.prompt_lookup_min else None
        self.observer: Observer | None = None
        self._is_warm = False

    @property
    def _max_len(self) -> int:
        """``max_model_len`` now: vLLM can shrink it to what fits in memory after this proposer is built."""
        return self.vllm_config.model_config.max_model_len

    def load_model(self, target_model: torch.nn.Module) -> None:
        with own_cache_settings(self.vllm_config):
            super().load_model(target_model)
        keep_windows_whole(self.model, self.vllm_config)
        check_loaded_head(self.model, self.vllm_config)
        self.selector = load_selector(self.model, self.vllm_config, self.device)
        self.drawn_by = self.selector or plain_selector(self.model, self.vllm_config, self.device)
        self.updates = HeadUpdates(self.model, target_model, self.selector, self.vllm_config)

    def validate_same_kv_cache_group(self, kv_cache_config: KVCacheConfig) -> None:
        """As inherited, in one line: the V1 runner keeps one attention metadata for all layers of a head."""
        try:
            super().validate_same_kv_cache_group(kv_cache_config)
        except AssertionError:
            what = "with this target vLLM splits the head's layers over KV cache groups, and V1 drafts from one only"
            raise RefusedError(f"{what}; {USE_V2}") from None
        warn_of_split(self.model, self.vllm_config, kv_cache_config)
        log_start(self, kv_cache_config)

    def initialize_attn_backend(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_attn_backend(*args, **kwargs)
        for group in self.draft_attn_groups:
            block_size = group.get_metadata_builder().kv_cache_spec.block_size
            group.create_metadata_builders(with_draft_model(self.vllm_config), self.device, block_size)

    @torch.inference_mode()
    def dummy_run(self, num_tokens: int, *args: Any, is_graph_capturing: bool = False, **kwargs: Any) -> None:
        """The inherited forward; while vLLM profiles memory, the largest draft logits too; kernels, once."""
        if self.block_size > 0 and not (self._is_warm or is_graph_capturing):
            self._warm_up()
        if self.updates.paused:
            self._determine_batch_execution_and_padding(num_tokens)
            return
        super().dummy_run(num_tokens, *args, is_graph_capturing=is_graph_capturing, **kwargs)
        if num_tokens == self.max_num_tokens and self.block_size <= 0:  # not later: vLLM would count it twice
            num_samples = min(self.max_batch_size * self.num_speculative_tokens, num_tokens)
            self._profile_sampling(self.hidden_states[:num_samples])

    def _profile_sampling(self, hidden_states: torch.Tensor) -> None:
        """Allocate what a full batch of drafts allocates."""
        if self.drawn_by is None:
            top_tokens(self.model, hidden_states)
        else:
            top_candidates(self.model, hidden_states, self.drawn_by.num_candidates)
        if self._enable_probabilistic_draft_probs:
            probs = torch.zeros(len(hidden_states), self._vocab_size, device=self.device)
            self._last_draft_probs: torch.Tensor | None = probs

    def _warm_up(self) -> None:
        """Compile what builds a draft batch and chooses drafts, which vLLM's dummy runs leave out."""
        token, num_k = torch.zeros(1, dtype=torch.int32, device=self.device), self.num_speculative_tokens
        cad = CommonAttentionMetadata(
            query_start_loc=self.arange[:2],
            query_start_loc_cpu=torch.arange(2, dtype=torch.int32),
            seq_lens=self._ones[:1],
            num_reqs=1,
            num_actual_tokens=1,
            max_query_len=1,
            max_seq_len=1,
            block_table_tensor=self.runner.input_batch.block_table[self.kv_cache_gid].get_device_tensor(1),
            slot_mapping=token.long(),
        )
        hidden_states = self.hidden_states[:num_k].clone()
        self.set_inputs_first_pass(token, token, token.long(), hidden_states, None, cad, None)
        drafts = self._greedy_sample(hidden_states).view(1, num_k)
        if self._enable_probabilistic_draft_probs:
            self._look_up(drafts, torch.zeros(num_k, self._vocab_size, device=self.device))
        self._look_up(drafts, None)
        self._is_warm = True

    @functools.wraps(EagleProposer.propose)
    def propose(self, num_speculative_tokens: int, target_token_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """The inherited drafts; zeros, each as a one-hot distribution, while the head's weights are not whole."""
        if self.runner.enable_prompt_embeds:  # an embedding has no token: vLLM leaves any id there, and on V2 token 0
            is_token = self.runner.is_token_ids.gpu[: len(target_token_ids)]
            target_token_ids = target_token_ids.where(is_token, 0)
        if self.history:
            cad, num_rejected = inputs["common_attn_metadata"], inputs.get("num_rejected_tokens_gpu")
            num_rejected = (self._none_rejected if num_rejected is None else num_rejected)[: cad.batch_size()]
            batch = self.runner.input_batch.req_ids, self.runner.requests, cad, num_rejected
            self.history.update(*batch, target_token_ids, inputs["next_token_ids"])
        if not self.updates.paused:
            return super().propose(num_speculative_tokens, target_token_ids, **inputs)
        self._last_draft_probs = None
        self._determine_batch_execution_and_padding(len(target_token_ids))  # data parallel ranks meet in it
        num_reqs = inputs["common_attn_metadata"].batch_size()
        return torch.zeros(num_reqs, num_speculative_tokens, dtype=torch.int64, device=self.device)

    def prepare_next_token_ids_padded(
        self,
        sampled_token_ids: torch.Tensor,
        requests: dict[str, Any],
        gpu_input_batch: Any,
        discard_request_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The inherited tokens, with the NEXT prompt token where a prefill chunk is not the last.

        vLLM's V1 feeds the LAST prompt token there, and the drafter's KV keeps it; an embedding raises there.
        """
        known: Any = dict.fromkeys(gpu_input_batch.req_ids, _NO_TOKENS)
        next_token_ids, num_valid = super().prepare_next_token_ids_padded(
            sampled_token_ids, known, gpu_input_batch, discard_request_mask
        )
        num_reqs = gpu_input_batch.num_reqs
        partial = self.runner.discard_request_mask.np[:num_reqs].nonzero()[0]
        if len(partial):
            scheduled = np.diff(self.runner.query_start_loc.np[: num_reqs + 1])
            next_position = (gpu_input_batch.num_computed_tokens_cpu[:num_reqs] + scheduled)[partial]
            tokens = gpu_input_batch.token_ids_cpu[partial, next_position].astype(np.int32)
            tokens *= gpu_input_batch.is_token_ids[partial, next_position]
            next_token_ids[async_tensor_h2d(partial, device=self.device)] = async_tensor_h2d(tokens, device=self.device)
        return next_token_ids, num_valid

    def set_inputs_first_pass(
        self,
        target_token_ids: torch.Tensor,
        next_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        cad: CommonAttentionMetadata,
        num_rejected_tokens_gpu: torch.Tensor | None,
    ) -> tuple[int, torch.Tensor, CommonAttentionMetadata]:
        """Build the draft batch; arguments and results as inherited."""
        num_reqs, num_k = cad.batch_size(), self.num_speculative_tokens
        if target_positions.dim() > 1:  # M-RoPE, whose positions stand still in an image
            target_positions = token_indices(cad)[1]
        lengths = ragged_lengths(np.diff(cad.query_start_loc_cpu.numpy()), num_k, self._max_len)
        starts = starts_of(lengths)
        num_rows, max_query_len = int(starts[-1]), int(lengths.max())
        buffers = self.buffers
        query_start_loc = buffers.query_start_loc[: num_reqs + 1]
        async_tensor_h2d(starts, device=self.device, out=query_start_loc)

        prepare_inputs(
            TargetBatch(
                input_ids=target_token_ids,
                positions=target_positions,
                query_start_loc=cad.query_start_loc,
                num_rejected=self._none_rejected if num_rejected_tokens_gpu is None else num_rejected_tokens_gpu,
                num_sampled=self._ones,
                idx_mapping=self._row_of_req,
                last_sampled=next_token_ids,
                next_prefill_tokens=next_token_ids,
                # The inherited sampling has its own.
                temperature=buffers.temperature,
                seeds=buffers.seeds,
                top_k=buffers.top_k,
                top_p=buffers.top_p,
            ),
            (),
            KVGroups((cad.block_table_tensor,), (self.block_size,)),
            DraftBatch(num_reqs, len(target_token_ids), num_k, num_rows, num_reqs_padded=num_reqs),
            buffers,
            max_model_len=self._max_len,
            parallel_drafting_token_id=self.parallel_drafting_token_id,
        )
        m, row_map = self.parallel_drafting_hidden_state_tensor, buffers.row_map[:num_rows]
        if self.updates.mask_is_stale:
            m.copy_(self.model.combine_hidden_states(self.model.mask_hidden.view(1, -1))[0])
            self.updates.mask_is_stale = False
        gather_hidden(self.hidden_states[:num_rows], target_hidden_states, m, row_map)

        bound = cad.seq_lens_cpu_upper_bound
        if bound is not None:
            bound = torch.from_numpy(seq_lens_bound(bound.numpy(), lengths, num_k, self._max_len))
        draft_cad = cad.replace(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens=buffers.seq_lens[:num_reqs],
            seq_lens_cpu_upper_bound=bound,
            num_actual_tokens=num_rows,
            max_query_len=max_query_len,
            max_seq_len=max(min(cad.max_seq_len + num_k, self._max_len), max_query_len),
            slot_mapping=buffers.slot_mappings[0, :num_rows],
            positions=None if cad.positions is None else self.positions[:num_rows],
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
        )
        return num_rows, buffers.sample_indices[: num_reqs * num_k], draft_cad

    def _greedy_sample(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.selector is None:
            return top_tokens(self.model, hidden_states)
        drafts = torch.empty_like(self.buffers.sample_indices[: len(hidden_states)])
        select(self.model, self.selector, hidden_states, self.buffers, drafts.view(-1, self.num_speculative_tokens))
        return drafts

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As inherited; probabilistic drafts are chosen among candidates, and some are looked up."""
        if self.observer:
            num_k, sample_pos = self.num_speculative_tokens, self.buffers.sample_pos[: len(hidden_states)]
            self.observer(sampled_rows(list(self.runner.input_batch.req_ids), num_k, sample_pos, hidden_states))
        drafts, draft_probs = self._choose(hidden_states, sampling_metadata)
        self._look_up(drafts.view(-1, self.num_speculative_tokens), draft_probs)
        return drafts, draft_probs

    def _look_up(self, drafts: torch.Tensor, draft_probs: torch.Tensor | None) -> None:
        """Replace, in place, those of [num_reqs, K] ``drafts`` that follow the request's last tokens elsewhere."""
        if self.history is None:
            return
        one_hot = None
        if draft_probs is not None:
            one_hot = OneHot(draft_probs.view(*drafts.shape, -1), self._row_of_req[: len(drafts)], 0.0, 1.0, None)
        history = self.history.token_ids, self.history.rows, self.history.last
        lookup_drafts(drafts, *history, self.prompt_lookup_min, self._vocab_size, one_hot)

    def _choose(
        self, hidden_states: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The head's drafts, and what they were drawn from."""
        selector = self.drawn_by
        if selector is None or not self._enable_probabilistic_draft_probs or sampling_metadata.all_greedy:
            return self._greedy_sample(hidden_states), None
        columns = []

        def draw(scores: torch.Tensor, column: int) -> torch.Tensor:
            chosen, probs = self._draw(scores, sampling_metadata)
            columns.append(probs.float())
            return chosen

        drafts = torch.empty_like(self.buffers.sample_indices[: len(hidden_states)])
        by_request = drafts.view(-1, self.num_speculative_tokens)
        ids = select(self.model, selector, hidden_states, self.buffers, by_request, draw=draw).ids
        offsets = self.model.draft_id_to_target_id
        targets = ids if offsets is None else ids + offsets[ids]
        draft_probs = torch.zeros(len(ids), self._vocab_size, device=self.device)
        return drafts, draft_probs.scatter_(1, targets, torch.stack(columns, dim=1).flatten(0, 1))

    def _draw(self, logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidates; the request's top-k and top-p apply to the head's distribution, as to the target's.

        A seeded request draws from its own generator, so that it repeats itself.
        """
        logits = within_limits(logits, sampling_metadata)
        draft_token_ids, draft_probs = self._sample_from_logits(logits, sampling_metadata)
        # The metadata's temperature is on the GPU: reading it would wait until the GPU has drafted.
        temperature, unfinished_prefill = self.runner.input_batch.temperature_cpu, self.runner.discard_request_mask.np
        for req, generator in sampling_metadata.generators.items():
            # Drafts of an unfinished prefill are thrown away; drawing them would tie the random stream to the chunks.
            if temperature[req] < _SAMPLING_EPS or unfinished_prefill[req]:
                continue
            row = slice(req, req + 1)
            noise = torch.empty_like(draft_probs[row]).exponential_(generator=generator)
            draft_token_ids[row] = sample_with_exponential_noise(draft_probs[row].clone(), noise)
        return draft_token_ids, draft_probs


def within_limits(logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> torch.Tensor:
    """[num_reqs, M] logits of candidates, -inf outside of the request's top-k and top-p, until vLLM PR 56724."""
    top_k, top_p = sampling_metadata.top_k, sampling_metadata.top_p
    temperature = sampling_metadata.temperature
    if top_k is None and top_p is None:
        return logits
    scale = torch.where(temperature < _SAMPLING_EPS, 1.0, temperature)[:, None]
    top_k = None if top_k is None else top_k.clamp(max=logits.shape[1])
    logits = logits.float()
    # vLLM's kernel for a GPU would be compiled for the few candidates while a request waits.
    kept = apply_top_k_top_p_pytorch(logits / scale, top_k, top_p)
    return logits.masked_fill(kept == -float("inf"), -float("inf"))
