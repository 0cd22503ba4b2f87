"""Tensors under another dialect's names, and an identity map of draft to target ids in a full-vocabulary head."""

from types import ModuleType

from peagle_vllm.heads.config import vllm_name
from peagle_vllm.seams.ledger import Seam, Touch, touches
from peagle_vllm.seams.loaded_head import HEAD_CLASSES
from peagle_vllm.seams.patching import wrap
from peagle_vllm.serving import on_vllm_platform, refuse_broken

SEAM = Seam(
    name="head-weights",
    runner="both",
    why="AWS's heads carry d2t although their draft vocabulary is the target's; vLLM then builds no parameter for it "
    "and fails on the tensor. NeMo puts model. before its tensors' names. And NaN or Inf is served in silence.",
    waits_for="vLLM's EAGLE-3 classes skipping d2t where they have no draft_id_to_target_id, and taking NeMo's names",
    delete_when="the AWS and NeMo heads of tests/heads/writers.py load in stock vLLM",
    touches=(
        *(Touch(module, f"{name}.load_weights", "wrapped") for module, name in HEAD_CLASSES.items()),
        *(
            touch
            for module, name in HEAD_CLASSES.items()
            for touch in touches(module, "called", "draft_id_to_target_id", "use_parallel_drafting", of=name)
        ),
    ),
)


def install(module: ModuleType) -> None:
    def make(original):
        def load_weights(self, weights, *args, **kwargs):
            if self.use_parallel_drafting and on_vllm_platform():
                weights = ((vllm_name(name), tensor) for name, tensor in refuse_broken(weights))
                # check_pair has refused a map that is not the identity.
                if self.draft_id_to_target_id is None:
                    weights = ((name, tensor) for name, tensor in weights if "d2t" not in name)
            return original(self, weights, *args, **kwargs)

        return load_weights

    wrap(getattr(module, HEAD_CLASSES[module.__name__]), "load_weights", make)
