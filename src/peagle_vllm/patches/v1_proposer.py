"""The V1 runner builds ``EagleProposer`` by name and checks for it in seven places."""

from types import ModuleType

from peagle_vllm import patches
from peagle_vllm.patches.ledger import Patch
from peagle_vllm.serving import is_peagle

PATCH = Patch(
    name="v1-proposer",
    runner="V1",
    why="An EagleProposer made for a P-EAGLE head becomes a ParallelEagleProposer; as a subclass it passes "
    "every isinstance check of the runner.",
    delete_when="vLLM drops the V1 model runner",
    depends_on={
        "vllm.v1.spec_decode.eagle": ("EagleProposer",),
        # Its base class: what ParallelEagleProposer overrides, and what calls that.
        "vllm.v1.spec_decode.llm_base_proposer": (
            "SpecDecodeBaseProposer.__init__",
            "SpecDecodeBaseProposer._init_parallel_drafting_params",
            "SpecDecodeBaseProposer.load_model",
            "SpecDecodeBaseProposer.validate_same_kv_cache_group",
            "SpecDecodeBaseProposer.initialize_attn_backend",
            "SpecDecodeBaseProposer.dummy_run",
            "SpecDecodeBaseProposer.propose",
            "SpecDecodeBaseProposer.prepare_next_token_ids_padded",
            "SpecDecodeBaseProposer.prepare_inputs_padded",
            "SpecDecodeBaseProposer.set_inputs_first_pass",
            "SpecDecodeBaseProposer.build_model_inputs_first_pass",
            "SpecDecodeBaseProposer.build_per_group_and_layer_attn_metadata",
            "SpecDecodeBaseProposer._get_slot_mapping",
            "SpecDecodeBaseProposer._greedy_sample",
            "SpecDecodeBaseProposer._sample_draft_tokens",
            "SpecDecodeBaseProposer._sample_from_logits",
            "SpecDecodeBaseProposer.take_last_draft_probs",
            "compute_probs_and_sample_next_token",
        ),
        "vllm.v1.worker.gpu_model_runner": ("GPUModelRunner.propose_draft_token_ids",),
        # The noise of seeded requests, as in _sample_from_logits.
        "vllm.v1.sample.ops.topk_topp_sampler": ("sample_with_exponential_noise",),
    },
)


def install(module: ModuleType) -> None:
    stock = module.EagleProposer
    if "__new__" in vars(stock):
        return

    def __new__(cls, vllm_config, *args, **kwargs):
        if cls is stock:
            patches.serving_peagle = is_peagle(vllm_config)
            if patches.serving_peagle:
                from peagle_vllm.v1.proposer import ParallelEagleProposer

                cls = ParallelEagleProposer
        return object.__new__(cls)

    stock.__new__ = __new__
