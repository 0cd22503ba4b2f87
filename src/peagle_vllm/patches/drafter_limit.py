"""On V1, one request near max_model_len stops drafting for the whole batch, or ends the engine.

The geometry handles the end of a sequence, so P-EAGLE drafts on.
"""

from peagle_vllm.patches.ledger import Patch

PATCH = Patch(name="drafter-limit", runner="V1")


@PATCH.wraps("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._input_fits_in_drafter")
def _input_fits_in_drafter(original, self, common_attn_metadata, *args, **kwargs):
    drafts_on = getattr(self.drafter, "drafts_up_to_max_model_len", False) and common_attn_metadata is not None
    # A shorter limit that the user set for the drafter holds; the head's own max_position_embeddings does not,
    # since vLLM gives its rotary embedding the target's length.
    limit = self.speculative_config and self.speculative_config.max_model_len
    if drafts_on and (limit is None or limit >= self.max_model_len):
        return True
    return original(self, common_attn_metadata, *args, **kwargs)


@PATCH.wraps("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._update_states")
def _update_states(original, self, scheduler_output, *args, **kwargs):
    if self.use_async_scheduling and getattr(getattr(self, "drafter", None), "drafts_up_to_max_model_len", False):
        # Once a request with penalties has come, vLLM cuts rejected drafts from every request's output tokens, and no
        # longer from its length, which then runs past the row of a request that nears max_model_len.
        batch, cached = self.input_batch, scheduler_output.scheduled_cached_reqs
        for req_id, num_output_tokens in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            if (row := batch.req_id_to_index.get(req_id)) is not None:
                end = batch.num_prompt_tokens[row] + num_output_tokens
                batch.num_tokens_no_spec[row] = min(batch.num_tokens_no_spec[row], end)
    return original(self, scheduler_output, *args, **kwargs)
