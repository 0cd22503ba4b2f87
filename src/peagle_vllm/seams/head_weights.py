"""A full-vocabulary head that carries an identity map of draft to target ids."""

from types import ModuleType

from peagle_vllm.seams.ledger import Seam, touches
from peagle_vllm.seams.patching import wrap

_CLASSES = {
    "vllm.model_executor.models.llama_eagle3": "Eagle3LlamaForCausalLM",
    "vllm.model_executor.models.qwen3_eagle3": "Eagle3Qwen3ForCausalLM",
}

SEAM = Seam(
    name="head weights",
    runner="both",
    why="AWS's heads carry d2t although their draft vocabulary is the target's; vLLM then builds no parameter for it "
    "and dies of the tensor.",
    waits_for="vLLM's EAGLE-3 classes skipping d2t where they have no draft_id_to_target_id",
    delete_when="an AWS head loads in stock vLLM (tests/heads/test_vllm_agrees.py)",
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
            # check_pair has refused a map that is not the identity.
            if self.use_parallel_drafting and self.draft_id_to_target_id is None:
                weights = ((name, tensor) for name, tensor in weights if "d2t" not in name)
            return original(self, weights, *args, **kwargs)

        return load_weights

    wrap(getattr(module, _CLASSES[module.__name__]), "load_weights", make)
