"""On V1 under asynchronous scheduling vLLM loses track of a request's drafts, its length, and which rows are tokens."""

from peagle_vllm.patches.ledger import Patch
from peagle_vllm.serving import is_peagle

PATCH = Patch(name="v1-async", runner="V1")


@PATCH.wraps("vllm.v1.core.sched.async_scheduler", "AsyncScheduler._update_after_schedule")
def _update_after_schedule(original, self, scheduler_output, *args, **kwargs):
    """Drop the drafts of a request that misses a step, because the token budget is used up or max_model_len is near.

    The worker has lost them. V1 would verify placeholders and reject them all, after an empty step with the
    distribution of the lost drafts, so that sampled answers were wrong. Until vLLM PR 46899. V1 also takes placeholders
    for tokens of the answer: there are no drafts where it is about to have ``min_tokens``.
    """
    original(self, scheduler_output, *args, **kwargs)
    if is_peagle(self.vllm_config) and not self.use_v2_model_runner:
        for request in self.running:
            left = request.sampling_params.min_tokens - request.num_output_tokens
            is_short = 0 < left < 4 * (1 + self.num_spec_tokens)  # two steps are in flight, one is next, one to spare
            if is_short or request.request_id not in scheduler_output.num_scheduled_tokens:
                request.spec_token_ids = []


@PATCH.wraps("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._update_states")
def _update_states(original, self, scheduler_output, *args, **kwargs):
    """Once a request with penalties has come, vLLM cuts rejected drafts from every request's output tokens.

    It then leaves them in the request's length, which runs past its row near max_model_len.
    """
    if is_peagle(self.vllm_config) and self.use_async_scheduling:
        batch, cached = self.input_batch, scheduler_output.scheduled_cached_reqs
        for req_id, num_output_tokens in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            if (row := batch.req_id_to_index.get(req_id)) is not None:
                end = batch.num_prompt_tokens[row] + num_output_tokens
                batch.num_tokens_no_spec[row] = min(batch.num_tokens_no_spec[row], end)
    return original(self, scheduler_output, *args, **kwargs)


@PATCH.wraps("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._prepare_input_ids")
def _prepare_input_ids(original, self, scheduler_output, num_reqs, num_tokens, *args, **kwargs):
    """With ``enable_prompt_embeds`` vLLM marks as tokens what it has sampled, at an index that leaves drafts out.

    It reads the other rows of an answer from a stale buffer. After the prompt, every row is a token.
    """
    if is_peagle(self.vllm_config) and self.enable_prompt_embeds:
        after = self.input_batch.num_computed_tokens_cpu - self.input_batch.num_prompt_tokens
        after = self.query_pos.np[:num_tokens] + after[self.req_indices.np[:num_tokens]]
        self.is_token_ids.np[:num_tokens] |= after >= 0
    return original(self, scheduler_output, num_reqs, num_tokens, *args, **kwargs)
