"""The V1 runner builds ``EagleProposer`` by name and checks for it in seven places.

One made for a P-EAGLE head becomes a ``ParallelEagleProposer``, which passes each check as a subclass.
"""

from types import ModuleType

from peagle_vllm.patches import cpu_sampling
from peagle_vllm.patches.ledger import Patch, members
from peagle_vllm.serving import is_peagle

PATCH = Patch(
    name="v1-proposer",
    runner="V1",
    depends_on={
        "vllm.v1.spec_decode.eagle": ("EagleProposer",),
        # Its base class: what ParallelEagleProposer overrides, and what calls that.
        "vllm.v1.spec_decode.llm_base_proposer": (
            *members("SpecDecodeBaseProposer", "__init__ _init_parallel_drafting_params load_model dummy_run propose"),
            *members("SpecDecodeBaseProposer", "validate_same_kv_cache_group initialize_attn_backend"),
            *members("SpecDecodeBaseProposer", "prepare_next_token_ids_padded prepare_inputs_padded"),
            *members("SpecDecodeBaseProposer", "set_inputs_first_pass build_model_inputs_first_pass"),
            *members("SpecDecodeBaseProposer", "build_per_group_and_layer_attn_metadata _get_slot_mapping"),
            *members("SpecDecodeBaseProposer", "_greedy_sample _sample_draft_tokens _sample_from_logits"),
            "SpecDecodeBaseProposer.take_last_draft_probs",
            "compute_probs_and_sample_next_token",
        ),
        # The noise of seeded requests, as in _sample_from_logits.
        "vllm.v1.sample.ops.topk_topp_sampler": ("sample_with_exponential_noise",),
    },
)


def build_ours(module: ModuleType) -> None:
    stock = module.EagleProposer

    def __new__(cls, vllm_config, *args, **kwargs):
        if cls is stock and is_peagle(vllm_config):
            cpu_sampling.serving_peagle = True
            from peagle_vllm.v1.proposer import ParallelEagleProposer

            cls = ParallelEagleProposer
        return object.__new__(cls)

    stock.__new__ = __new__


PATCH.hooks.append(("vllm.v1.spec_decode.eagle", build_ours))


@PATCH.wraps("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.propose_draft_token_ids")
def propose_draft_token_ids(
    original, self, scheduler_output, sampled, sampling_metadata, hidden_states, *args, **kwargs
):
    """Prompt logprobs are computed later, from memory that the target's graphs and the drafter's share (PR 53520)."""
    kept = hidden_states.clone() if is_peagle(self.vllm_config) and self.num_prompt_logprobs else None
    drafts = original(self, scheduler_output, sampled, sampling_metadata, hidden_states, *args, **kwargs)
    if kept is not None:
        hidden_states.copy_(kept)
    return drafts
