"""Model Runner V2 refuses P-EAGLE; this lets it through."""

from types import ModuleType

from peagle_vllm.seams.ledger import Seam, Touch
from peagle_vllm.seams.patching import wrap
from peagle_vllm.serving import is_peagle

REFUSAL = "parallel drafting for EAGLE speculative decoding"

SEAM = Seam(
    name="gate",
    runner="V2",
    why="vLLM lists P-EAGLE among what Model Runner V2 does not support, and falls back to V1.",
    waits_for="a P-EAGLE speculator in vLLM's Model Runner V2",
    delete_when="vLLM no longer names parallel drafting in VllmConfig._get_v2_model_runner_unsupported_features",
    obsolete_if_missing=REFUSAL,
    touches=(Touch("vllm.config.vllm", "VllmConfig._get_v2_model_runner_unsupported_features", "wrapped"),),
)


def install(module: ModuleType) -> None:
    def make(original):
        def _get_v2_model_runner_unsupported_features(self, *args, **kwargs):
            unsupported = original(self, *args, **kwargs)
            if is_peagle(self):
                return [feature for feature in unsupported if feature != REFUSAL]
            return unsupported

        return _get_v2_model_runner_unsupported_features

    wrap(module.VllmConfig, "_get_v2_model_runner_unsupported_features", make)
