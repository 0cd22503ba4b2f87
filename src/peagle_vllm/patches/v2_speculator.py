"""Model Runner V2 builds its speculator in ``init_speculator``, which has no registry: P-EAGLE's is built there.

The runner gives speculators the temperatures and seeds of its sampler's states; P-EAGLE's takes the states themselves,
for their top-k and top-p.
"""

from peagle_vllm.lookup import prompt_lookup_min
from peagle_vllm.patches.ledger import Patch, members
from peagle_vllm.serving import is_peagle

PATCH = Patch(
    name="v2-speculator",
    runner="V2",
    depends_on={
        "vllm.v1.worker.gpu.model_runner": ("GPUModelRunner._dummy_run",),
        "vllm.v1.worker.gpu.sample.states": members("SamplingStates", "__init__ apply_staged_writes"),
        "vllm.v1.worker.gpu.states": ("RequestState.__init__",),
        "vllm.v1.worker.gpu.buffer_utils": members("StagedWriteTensor", "__init__ apply_write"),
        "vllm.v1.worker.gpu.input_batch": ("post_update",),
        "vllm.v1.worker.gpu.structured_outputs": ("grammar_invalid_drafts",),
        "vllm.v1.core.sched.scheduler": ("Scheduler.update_draft_token_ids_in_output",),
        # The base classes of ParallelEagleSpeculator: what it overrides, and what calls that or is called in its place.
        "vllm.v1.worker.gpu.spec_decode.eagle.speculator": ("EagleSpeculator",),
        "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator": members(
            "TargetDependentARSpeculator",
            "__init__ load_model _configure_decode_metadata_update init_cudagraph_manager capture propose _run_model",
        ),
        "vllm.v1.worker.gpu.spec_decode.speculator": (
            *members("BaseSpeculator", "num_query_per_req num_extra_query_per_req propose"),
            *members("DraftModelSpeculator", "__init__ load_model attn_vllm_config set_attn max_model_len"),
            *members("DraftModelSpeculator", "draft_logits_spec sample_draft compute_draft_logits"),
            *members("DraftModelSpeculator", "_configure_decode_metadata_update _update_draft_decode_metadata"),
            *members("DraftModelSpeculator", "_build_attn_metadata _copy_request_inputs"),
            *members("DraftModelSpeculator", "_maybe_predict_acceptance"),
        ),
        "vllm.v1.worker.gpu.cudagraph_utils": ("CudaGraphManager", "_is_compatible", "has_compiled_submodule"),
        # What DraftAttention calls in place of _build_attn_metadata, and sets on FlashAttention's builder.
        "vllm.v1.worker.gpu.attn_utils": ("build_attn_metadata",),
        "vllm.v1.worker.gpu.block_table": ("BlockTables.get_dummy_block_tables",),
        "vllm.v1.worker.utils": (
            *members("AttentionGroup", "build_metadata build_metadata_for_cudagraph_capture map_to_kernel_block_table"),
            *members("AttentionGroup", "supports_draft_decode_metadata_update update_draft_decode_metadata"),
        ),
        "vllm.v1.attention.backends.flash_attn": ("FlashAttentionMetadataBuilder.__init__",),
        # The noise that drafts are drawn with, as in sample_draft.
        "vllm.v1.worker.gpu.sample.gumbel": ("gumbel_noised_argmax", "gumbel_block_argmax", "spec_step_seed"),
        # What verifies drawn drafts divides draft_logits by the temperature.
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils": (
            *("_compute_global_logprobs_and_logsumexp", "_compute_local_logits_stats_kernel", "_resample_kernel"),
            "rejection_sample",
        ),
    },
)


@PATCH.wraps("vllm.v1.worker.gpu.spec_decode", "init_speculator")
@PATCH.wraps("vllm.v1.worker.gpu.model_runner", "init_speculator")  # which imports it by value
def init_speculator(original, vllm_config, device, req_states, *args, **kwargs):
    if not is_peagle(vllm_config):
        return original(vllm_config, device, req_states, *args, **kwargs)
    # Imported late: vLLM's CPU worker patches names that these modules would bind.
    from peagle_vllm.v2.speculator import ParallelEagleSpeculator

    if prompt_lookup_min(vllm_config):
        # On the device, as for vLLM's own look-up: else the kernel would read the host's memory in every step. Prompts
        # still come through pinned memory, many times faster than vLLM's own copy to a tensor on the device.
        tokens = req_states.all_token_ids
        tokens.gpu = tokens.gpu.new_zeros(tokens.gpu.shape, device=device)
    return ParallelEagleSpeculator(vllm_config, device, req_states)


@PATCH.wraps("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.load_model")
def load_model(original, self, *args, **kwargs):
    loaded = original(self, *args, **kwargs)
    if is_peagle(self.vllm_config) and self.sampler is not None and self.speculator is not None:
        self.speculator.sampling_states = self.sampler.sampling_states
    return loaded


@PATCH.wraps("vllm.v1.core.sched.scheduler", "Scheduler.get_grammar_bitmask")
def get_grammar_bitmask(original, self, scheduler_output, *args, **kwargs):
    """A drawn draft that the grammar has refused is verified, too: its row of the bitmask is the grammar's.

    vLLM would end before it and sample from the target alone, which favours the tokens that the head draws often.
    """
    grammar, config = original(self, scheduler_output, *args, **kwargs), self.vllm_config
    if not grammar or not is_peagle(config) or config.speculative_config.draft_sample_method != "probabilistic":
        return grammar
    if refused := scheduler_output.num_invalid_spec_tokens:
        numbers = zip(grammar.structured_output_request_ids, grammar.num_acceptable_drafts, strict=True)
        grammar.num_acceptable_drafts = [number + (req_id in refused) for req_id, number in numbers]
    return grammar


@PATCH.wraps("vllm.v1.worker.gpu.spec_decode.eagle.utils", "_should_share")
def _should_share(original, eagle, flag, draft, target, *args, **kwargs):
    """A quantized layer is no copy of another; vLLM compares weights that it may not have (PR 53104).

    Dummy weights, which real ones will replace, are no copy either.
    """
    dtypes = {getattr(getattr(module, "weight", None), "dtype", module) for module in (draft, target)}
    is_own = hasattr(eagle, "mask_hidden") and getattr(eagle, flag, False)
    if is_own and (len(dtypes) > 1 or not hasattr(eagle, "peagle_own_modules")):
        return False
    return original(eagle, flag, draft, target, *args, **kwargs)
