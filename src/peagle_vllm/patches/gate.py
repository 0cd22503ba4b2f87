"""Takes P-EAGLE off the list of what Model Runner V2 does not support, for which vLLM falls back to V1."""

import functools
from types import ModuleType

from peagle_vllm.patches.ledger import Patch
from peagle_vllm.patches.patching import wrap
from peagle_vllm.serving import is_peagle, logger

REFUSAL = "parallel drafting for EAGLE speculative decoding"

PATCH = Patch(
    name="gate",
    runner="V2",
    depends_on={"vllm.config.vllm": ("VllmConfig._get_v2_model_runner_unsupported_features",)},
)


def install(module: ModuleType) -> None:
    @wrap(module.VllmConfig, "_get_v2_model_runner_unsupported_features")
    def _get_v2_model_runner_unsupported_features(original, self, *args, **kwargs):
        unsupported = original(self, *args, **kwargs)
        if not is_peagle(self):
            return unsupported
        # "auto" until one of vLLM's platforms has put its own worker there.
        worker = str(self.parallel_config.worker_cls)
        if worker.partition(".")[0] not in ("auto", "vllm"):
            _warn_of_foreign_worker(worker)
            return unsupported
        return [feature for feature in unsupported if feature != REFUSAL]


@functools.cache
def _warn_of_foreign_worker(worker: str) -> None:
    logger.warning("P-EAGLE stays off Model Runner V2: the worker class %s may have a runner of its own", worker)
