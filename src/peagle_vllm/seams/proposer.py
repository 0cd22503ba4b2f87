"""The V1 runner builds ``EagleProposer`` by name and checks for it in seven places."""

from types import ModuleType

import peagle_vllm.seams as seams
from peagle_vllm.seams.ledger import Seam, Touch, touches
from peagle_vllm.seams.loaded_head import LOADED_HEAD
from peagle_vllm.serving import is_peagle

SEAM = Seam(
    name="proposer",
    runner="V1",
    why="An EagleProposer made for a P-EAGLE head becomes a ParallelEagleProposer; as a subclass it passes "
    "every isinstance check of the runner.",
    waits_for="nothing: vLLM has deprecated the V1 runner",
    delete_when="vLLM drops the V1 model runner",
    touches=(
        Touch("vllm.v1.spec_decode.eagle", "EagleProposer", "replaced"),
        # The runner's side: how it builds and calls a proposer, and what is read of it.
        *touches(
            "vllm.v1.worker.gpu_model_runner",
            "called",
            "EagleProposer",
            "GPUModelRunner.propose_draft_token_ids",
            "GPUModelRunner.query_start_loc",
            "GPUModelRunner.discard_request_mask",
        ),
        *touches("vllm.v1.utils", "called", "np", of="CpuGpuBuffer"),
        *touches(
            "vllm.v1.worker.gpu_input_batch",
            "called",
            "num_reqs",
            "num_computed_tokens_cpu",
            "num_prompt_tokens",
            "token_ids_cpu",
            of="InputBatch",
        ),
        # The base class.
        *touches(
            "vllm.v1.spec_decode.llm_base_proposer",
            "replaced",
            "prepare_next_token_ids_padded",
            "set_inputs_first_pass",
            "_sample_from_logits",
            "_determine_batch_execution_and_padding",
            of="SpecDecodeBaseProposer",
        ),
        *touches("vllm.v1.spec_decode.llm_base_proposer", "called", "compute_probs_and_sample_next_token"),
        *touches("vllm.utils.torch_utils", "called", "async_tensor_h2d", what="signature"),
        *touches(
            "vllm.v1.spec_decode.llm_base_proposer",
            "inherited",
            "__init__",
            "_init_parallel_drafting_params",
            "load_model",
            "initialize_attn_backend",
            "dummy_run",
            "prepare_inputs_padded",
            "propose",
            "build_model_inputs_first_pass",
            "build_per_group_and_layer_attn_metadata",
            "_get_slot_mapping",
            "_sample_draft_tokens",
            "_greedy_sample",
            "take_last_draft_probs",
            of="SpecDecodeBaseProposer",
        ),
        *touches("vllm.config.compilation", "called", "CUDAGraphMode"),
        # What it is called with.
        *touches("vllm.v1.attention.backend", "called", "CommonAttentionMetadata", what="signature"),
        *touches("vllm.v1.sample.metadata", "called", "SamplingMetadata", what="signature"),
        *touches("vllm.v1.sample.ops.topk_topp_sampler", "called", "sample_with_exponential_noise"),
        *touches("vllm.v1.sample.sampler", "called", "_SAMPLING_EPS"),
        # The configuration.
        *touches(
            "vllm.config.vllm",
            "called",
            "load_config",
            "model_config",
            "speculative_config",
            of="VllmConfig",
            what="signature",
        ),
        *touches("vllm.config.model", "called", "hf_config", "max_model_len", of="ModelConfig", what="signature"),
        *touches("vllm.config.speculative", "called", "draft_model_config", of="SpeculativeConfig", what="signature"),
        *touches("vllm.config.load", "called", "load_format", of="LoadConfig", what="signature"),
        *LOADED_HEAD,
    ),
)


def install(module: ModuleType) -> None:
    stock = module.EagleProposer
    if "__new__" in vars(stock):
        return

    def __new__(cls, vllm_config, *args, **kwargs):
        if cls is stock:
            seams.serving_peagle = is_peagle(vllm_config)
            if seams.serving_peagle:
                from peagle_vllm.v1.proposer import ParallelEagleProposer

                cls = ParallelEagleProposer
        return object.__new__(cls)

    stock.__new__ = __new__
