"""Tensors under another dialect's names, and an identity map of draft to target ids in a full-vocabulary head."""

from types import ModuleType

from peagle_vllm.heads.config import vllm_name
from peagle_vllm.seams.ledger import Seam, touches
from peagle_vllm.seams.patching import wrap
from peagle_vllm.serving import refuse_broken

_CLASSES = {
    "vllm.model_executor.models.llama_eagle3": "Eagle3LlamaForCausalLM",
    "vllm.model_executor.models.qwen3_eagle3": "Eagle3Qwen3ForCausalLM",
}

SEAM = Seam(
    name="head weights",
    runner="both",
    why="AWS's heads carry d2t although their draft vocabulary is the target's; vLLM then builds no parameter for it "
    "and dies of the tensor. NeMo puts model. before its tensors' names. And NaN or Inf is served in silence.",
    waits_for="vLLM's EAGLE-3 classes skipping d2t where they have no draft_id_to_target_id, and taking NeMo's names",
    delete_when="the AWS and NeMo heads of tests/heads/writers.py load in stock vLLM",
    touches=(
        *touches("vllm.model_executor.models.llama_eagle3", "wrapped", "load_weights", of="Eagle3LlamaForCausalLM"),
        *touches("vllm.model_executor.models.qwen3_eagle3", "wrapped", "load_weights", of="Eagle3Qwen3ForCausalLM"),
        *touches(
            "vllm.model_executor.models.llama_eagle3", "called", "draft_id_to_target_id", of="Eagle3LlamaForCausalLM"
        ),
        *touches(
            "vllm.model_executor.models.qwen3_eagle3", "called", "draft_id_to_target_id", of="Eagle3Qwen3ForCausalLM"
        ),
    ),
)


def install(module: ModuleType) -> None:
    def make(original):
        def load_weights(self, weights, *args, **kwargs):
            if self.use_parallel_drafting:
                weights = ((vllm_name(name), tensor) for name, tensor in refuse_broken(weights))
                # check_pair has refused a map that is not the identity.
                if self.draft_id_to_target_id is None:
                    weights = ((name, tensor) for name, tensor in weights if "d2t" not in name)
            return original(self, weights, *args, **kwargs)

        return load_weights

    wrap(getattr(module, _CLASSES[module.__name__]), "load_weights", make)
