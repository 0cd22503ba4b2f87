"""Model Runner V2 builds its speculator in ``init_speculator``, which has no registry."""

from types import ModuleType

from peagle_vllm.seams.ledger import Seam, Touch, touches
from peagle_vllm.seams.patching import wrap
from peagle_vllm.serving import is_peagle

SEAM = Seam(
    name="speculator",
    runner="V2",
    why="init_speculator would build vLLM's sequential EagleSpeculator for a P-EAGLE head.",
    waits_for="a speculator registry in vLLM, or ParallelEagleSpeculator merged there",
    delete_when="init_speculator can be told of a speculator class",
    touches=(
        Touch("vllm.v1.worker.gpu.spec_decode", "init_speculator", "wrapped"),
        Touch("vllm.v1.worker.gpu.model_runner", "init_speculator", "wrapped"),
        # The runner's side: how it builds and calls a speculator, and the state it hands over.
        *touches(
            "vllm.v1.worker.gpu.model_runner",
            "called",
            "speculator",
            "speculator.load_model",
            "speculator.set_attn",
            "speculator.init_cudagraph_manager",
            "speculator.capture",
            "speculator.propose",
            "use_aux_hidden_state_outputs",
            of="GPUModelRunner",
        ),
        *touches(
            "vllm.v1.worker.gpu.states", "called", "last_sampled_tokens", "next_prefill_tokens", of="RequestState"
        ),
        # The base classes.
        *touches("vllm.v1.worker.gpu.spec_decode.eagle.speculator", "inherited", "EagleSpeculator"),
        *touches(
            "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator",
            "inherited",
            "__init__",
            "load_model",
            of="TargetDependentARSpeculator",
        ),
        *touches(
            "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator",
            "replaced",
            "init_cudagraph_manager",
            "capture",
            "propose",
            "_configure_decode_metadata_update",
            "_run_model",
            "hidden_states",
            of="TargetDependentARSpeculator",
        ),
        *touches(
            "vllm.v1.worker.gpu.spec_decode.speculator",
            "replaced",
            "num_query_per_req",
            "num_extra_query_per_req",
            of="BaseSpeculator",
        ),
        *touches(
            "vllm.v1.worker.gpu.spec_decode.speculator", "replaced", "propose", of="BaseSpeculator", what="signature"
        ),
        *touches(
            "vllm.v1.worker.gpu.spec_decode.speculator",
            "inherited",
            "__init__",
            "max_model_len",
            "load_model",
            "set_attn",
            "_configure_decode_metadata_update",
            "supports_decode_metadata_update",
            of="DraftModelSpeculator",
        ),
        *touches(
            "vllm.v1.worker.gpu.spec_decode.speculator",
            "called",
            "_prepare_eplb_forward",
            "_update_draft_decode_metadata",
            "sample_draft",
            "compute_draft_logits",
            of="DraftModelSpeculator",
        ),
        *touches(
            "vllm.v1.worker.gpu.spec_decode.speculator",
            "replaced",
            "_build_attn_metadata",
            "_copy_request_inputs",
            "attn_vllm_config",
            of="DraftModelSpeculator",
        ),
        # The draft step's CUDA graphs.
        *touches(
            "vllm.v1.worker.gpu.cudagraph_utils",
            "inherited",
            "__init__",
            "capture",
            "dispatch",
            "run_fullgraph",
            of="CudaGraphManager",
        ),
        *touches("vllm.v1.worker.gpu.cudagraph_utils", "replaced", "_init_candidates", of="CudaGraphManager"),
        *touches("vllm.v1.worker.gpu.cudagraph_utils", "called", "CudaGraphManager", what="signature"),
        *touches("vllm.v1.worker.gpu.cudagraph_utils", "called", "BatchExecutionDescriptor", "_is_compatible"),
        *touches("vllm.v1.worker.gpu.block_table", "called", "get_dummy_block_tables", of="BlockTables"),
        *touches("vllm.v1.spec_decode.dynamic.utils", "called", "build_dynamic_sd_schedule_lookup"),
        *touches("vllm.config.compilation", "called", "CUDAGraphMode"),
        *touches("vllm.v1.attention.backend", "called", "AttentionCGSupport", "max_decode_query_len"),
        *touches("vllm.v1.worker.gpu.spec_decode.speculator", "called", "DraftModelSpeculator", what="signature"),
        # What propose is called with, and what the draft batch is built with.
        *touches("vllm.v1.worker.gpu.input_batch", "called", "InputBatch", what="signature"),
        *touches("vllm.v1.worker.gpu.input_batch", "called", "InputBuffers"),
        *touches("vllm.v1.worker.gpu.block_table", "called", "input_block_tables", "block_sizes", of="BlockTables"),
        *touches("vllm.v1.worker.gpu.attn_utils", "called", "build_attn_metadata"),
        *touches("vllm.v1.worker.gpu.dp_utils", "called", "DPSyncState", what="signature"),
        *touches("vllm.v1.worker.gpu.spec_decode.utils", "called", "get_parallel_drafting_token_id"),
        *touches("vllm.v1.worker.utils", "called", "AttentionGroup", what="signature"),
        *touches("vllm.utils.torch_utils", "called", "async_tensor_h2d", what="signature"),
        *touches("vllm.v1.kv_cache_interface", "called", "get_kv_cache_spec_sliding_window"),
        *touches("vllm.forward_context", "called", "BatchDescriptor", "set_forward_context", what="signature"),
        # The heads: the buffer mask_hidden, what fills it, and what projects it.
        *touches(
            "vllm.model_executor.models.llama_eagle3",
            "called",
            "__init__",
            "load_weights",
            "combine_hidden_states",
            of="Eagle3LlamaForCausalLM",
        ),
        *touches(
            "vllm.model_executor.models.llama_eagle3",
            "called",
            "forward",
            of="Eagle3LlamaForCausalLM",
            what="signature",
        ),
        *touches(
            "vllm.model_executor.models.qwen3_eagle3",
            "called",
            "__init__",
            "load_weights",
            "combine_hidden_states",
            of="Eagle3Qwen3ForCausalLM",
        ),
        *touches(
            "vllm.model_executor.models.qwen3_eagle3",
            "called",
            "forward",
            of="Eagle3Qwen3ForCausalLM",
            what="signature",
        ),
    ),
)


def install(module: ModuleType) -> None:
    """Wrap ``init_speculator`` in the module that defines it or in the runner, which imports it by value."""

    def make(original):
        def init_speculator(vllm_config, device, *args, **kwargs):
            if not is_peagle(vllm_config):
                return original(vllm_config, device, *args, **kwargs)
            # Imported late: vLLM's CPU worker patches names that this module would bind.
            from peagle_vllm.v2.speculator import ParallelEagleSpeculator

            return ParallelEagleSpeculator(vllm_config, device)

        return init_speculator

    wrap(module, "init_speculator", make)
