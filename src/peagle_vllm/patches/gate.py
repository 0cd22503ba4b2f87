"""Takes P-EAGLE off the list of what Model Runner V2 does not support, for which vLLM falls back to V1."""

from peagle_vllm.patches.ledger import Patch
from peagle_vllm.serving import is_peagle

REFUSAL = "parallel drafting for EAGLE speculative decoding"

PATCH = Patch(name="gate", runner="V2")


@PATCH.wraps("vllm.config.vllm", "VllmConfig._get_v2_model_runner_unsupported_features")
def _get_v2_model_runner_unsupported_features(original, self, *args, **kwargs):
    return [feature for feature in original(self, *args, **kwargs) if feature != REFUSAL or not is_peagle(self)]
