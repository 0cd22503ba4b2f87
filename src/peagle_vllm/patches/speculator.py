"""Model Runner V2 builds its speculator in ``init_speculator``, which has no registry: P-EAGLE's is built there."""

from types import ModuleType

from peagle_vllm.patches.head_weights import ALSO_OF_HEADS, HEAD_TYPES
from peagle_vllm.patches.ledger import Seam
from peagle_vllm.patches.patching import wrap
from peagle_vllm.serving import is_peagle

SEAM = Seam(
    name="speculator",
    runner="V2",
    why="init_speculator would build vLLM's sequential EagleSpeculator for a P-EAGLE head.",
    waits_for="a speculator registry in vLLM, or ParallelEagleSpeculator merged there",
    delete_when="init_speculator takes a speculator class from a plugin",
    types={
        "model": HEAD_TYPES,
        "builder": ("vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder",),
        "own": ("vllm.v1.attention.backends.flash_attn:FlashAttentionMetadata",),
    },
    also={
        **ALSO_OF_HEADS,
        # How the runner builds and calls a speculator, and the state that it hands over.
        "vllm.v1.worker.gpu.model_runner": (
            "GPUModelRunner.speculator",
            "GPUModelRunner.speculator.load_model",
            "GPUModelRunner.speculator.set_attn",
            "GPUModelRunner.speculator.init_cudagraph_manager",
            "GPUModelRunner.speculator.capture",
            "GPUModelRunner.speculator.propose",
            "GPUModelRunner.use_aux_hidden_state_outputs",
        ),
        "vllm.v1.worker.gpu.states": ("RequestState.last_sampled_tokens", "RequestState.next_prefill_tokens"),
        # What propose of the base classes does with the same buffers, and ours in its place.
        "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator": ("TargetDependentARSpeculator._run_model",),
        "vllm.v1.worker.gpu.spec_decode.speculator": (
            "DraftModelSpeculator._build_attn_metadata",
            "DraftModelSpeculator._copy_request_inputs",
            "DraftModelSpeculator.compute_draft_logits",
            "DraftModelSpeculator.max_model_len",
            "BaseSpeculator.propose",
        ),
        # How the draft step's CUDA graphs are captured and found.
        "vllm.v1.worker.gpu.cudagraph_utils": ("_is_compatible",),
        "vllm.compilation.cuda_graph": ("CUDAGraphWrapper", "CUDAGraphWrapper.__call__"),
        # How a backend's metadata is built, and what of it a captured graph keeps.
        "vllm.v1.worker.utils": (
            "AttentionGroup.build_metadata",
            "AttentionGroup.build_metadata_for_cudagraph_capture",
            "AttentionGroup._with_kernel_block_table",
            "AttentionGroup.supports_draft_decode_metadata_update",
            "AttentionGroup.update_draft_decode_metadata",
        ),
        "vllm.v1.attention.backend": (
            "max_decode_query_len",
            "AttentionMetadataBuilder.build",
            "AttentionMetadataBuilder.build_for_cudagraph_capture",
            "AttentionMetadataBuilder.supports_draft_decode_metadata_update",
            "AttentionMetadataBuilder.update_draft_decode_metadata",
        ),
    },
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
