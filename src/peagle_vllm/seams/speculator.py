"""Model Runner V2 builds its speculator in ``init_speculator``, which has no registry."""

from types import ModuleType

from peagle_vllm.seams.ledger import Seam, Touch, touches
from peagle_vllm.seams.loaded_head import LOADED_HEAD
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
        *touches("vllm.v1.worker.gpu.cudagraph_utils", "called", "_graphs_captured", of="CudaGraphManager"),
        *touches("vllm.v1.worker.gpu.cudagraph_utils", "called", "CudaGraphManager", what="signature"),
        *touches(
            "vllm.v1.worker.gpu.cudagraph_utils",
            "called",
            "BatchExecutionDescriptor",
            "_is_compatible",
            "has_compiled_submodule",
        ),
        *touches(
            "vllm.v1.worker.gpu.cudagraph_utils",
            "called",
            "use_breakable_cg",
            "init_breakable_cg_runner",
            "run_pw_graph",
            of="CudaGraphManager",
        ),
        *touches("vllm.compilation.cuda_graph", "called", "CUDAGraphWrapper", what="signature"),
        *touches("vllm.compilation.cuda_graph", "called", "__call__", of="CUDAGraphWrapper"),
        *touches("vllm.v1.worker.gpu.block_table", "called", "get_dummy_block_tables", of="BlockTables"),
        *touches("vllm.compilation.breakable_cudagraph", "called", "is_breakable_cudagraph_enabled"),
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
        # How a backend's metadata is built, and what of it a captured graph keeps.
        *touches(
            "vllm.v1.worker.utils",
            "called",
            "build_metadata",
            "build_metadata_for_cudagraph_capture",
            "_with_kernel_block_table",
            "map_to_kernel_block_table",
            "supports_draft_decode_metadata_update",
            "update_draft_decode_metadata",
            "get_metadata_builder",
            of="AttentionGroup",
        ),
        *touches(
            "vllm.v1.attention.backend",
            "called",
            "kv_cache_spec",
            "build",
            "build_for_cudagraph_capture",
            "supports_draft_decode_metadata_update",
            "update_draft_decode_metadata",
            of="AttentionMetadataBuilder",
            what="signature",
        ),
        *touches(
            "vllm.v1.attention.backends.flash_attn",
            "called",
            "aot_schedule",
            "max_cudagraph_size",
            of="FlashAttentionMetadataBuilder",
        ),
        *touches("vllm.v1.attention.backends.flash_attn", "called", "max_num_splits", of="FlashAttentionMetadata"),
        *touches("vllm.v1.worker.gpu.attn_utils", "called", "AttentionCGSupportInfo", what="signature"),
        # The configuration.
        *touches(
            "vllm.config.vllm",
            "called",
            "compilation_config",
            "load_config",
            "model_config",
            "num_speculative_tokens",
            "scheduler_config",
            "speculative_config",
            of="VllmConfig",
            what="signature",
        ),
        *touches(
            "vllm.config.compilation",
            "called",
            "cudagraph_capture_sizes",
            "max_cudagraph_capture_size",
            of="CompilationConfig",
            what="signature",
        ),
        *touches(
            "vllm.config.scheduler",
            "called",
            "max_num_seqs",
            "max_num_batched_tokens",
            of="SchedulerConfig",
            what="signature",
        ),
        *touches(
            "vllm.config.speculative",
            "called",
            "draft_model_config",
            "enable_adaptive_verification",
            "num_speculative_tokens_per_batch_size",
            "uses_dynamic_speculative_decoding",
            of="SpeculativeConfig",
            what="signature",
        ),
        *touches("vllm.config.model", "called", "hf_config", "max_model_len", of="ModelConfig", what="signature"),
        *touches("vllm.config.load", "called", "load_format", of="LoadConfig", what="signature"),
        *LOADED_HEAD,
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
