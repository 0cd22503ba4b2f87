"""The V1 runner builds ``EagleProposer`` by name and checks for it in seven places."""

from types import ModuleType

import peagle_vllm.patches as seams
from peagle_vllm.patches.head_weights import ALSO_OF_HEADS, HEAD_TYPES
from peagle_vllm.patches.ledger import Seam
from peagle_vllm.serving import is_peagle

SEAM = Seam(
    name="proposer",
    runner="V1",
    why="An EagleProposer made for a P-EAGLE head becomes a ParallelEagleProposer; as a subclass it passes "
    "every isinstance check of the runner.",
    waits_for="nothing: vLLM has deprecated the V1 runner",
    delete_when="vLLM drops the V1 model runner",
    types={
        "model": HEAD_TYPES,
        "runner": ("vllm.v1.worker.gpu_model_runner:GPUModelRunner",),
        "gpu_input_batch": ("vllm.v1.worker.gpu_input_batch:InputBatch",),
    },
    also={
        **ALSO_OF_HEADS,
        # How the runner builds a proposer, calls it and reads its results.
        "vllm.v1.worker.gpu_model_runner": ("EagleProposer", "GPUModelRunner.propose_draft_token_ids"),
        # What inherited methods do in between.
        "vllm.v1.spec_decode.llm_base_proposer": (
            "SpecDecodeBaseProposer._init_parallel_drafting_params",
            "SpecDecodeBaseProposer.initialize_attn_backend",
            "SpecDecodeBaseProposer.prepare_inputs_padded",
            "SpecDecodeBaseProposer.build_model_inputs_first_pass",
            "SpecDecodeBaseProposer.build_per_group_and_layer_attn_metadata",
            "SpecDecodeBaseProposer._get_slot_mapping",
            "SpecDecodeBaseProposer.take_last_draft_probs",
        ),
        "vllm.v1.attention.backend": ("CommonAttentionMetadata",),  # its fields are arguments of replace()
        "vllm.config.compilation": ("CUDAGraphMode",),  # the names in draft_stats.RAN_AS
    },
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
