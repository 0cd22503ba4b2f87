"""vLLM's draft weight update tells the head's drafter when it begins, fails and ends."""

from types import ModuleType
from typing import Any

from peagle_vllm.patches.ledger import Patch, members
from peagle_vllm.patches.patching import wrap

PATCH = Patch(
    name="weight-update",
    runner="both",
    depends_on={
        "vllm.v1.worker.gpu_worker": (
            *members("Worker", "_set_draft_weight_update_target _start_weight_update"),
            *members("Worker", "update_weights finish_weight_update"),
        ),
        # Which layers are half loaded, and how they are put back.
        "vllm.model_executor.model_loader.reload.types": ("LayerReloadingInfo",),
        "vllm.model_executor.model_loader.reload.layerwise": (
            "initialize_layerwise_reload",
            "finalize_layerwise_processing",
        ),
    },
)


def install(module: ModuleType) -> None:
    @wrap(module.Worker, "_set_draft_weight_update_target")
    def _set_draft_weight_update_target(original, self):
        original(self)
        if updates := _updates(self):
            updates.begin()

    @wrap(module.Worker, "_start_weight_update")
    def _start_weight_update(original, self, *args, **kwargs):
        is_other = self._weight_update_active  # which goes on
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            if not is_other and (updates := _updates(self)):
                updates.fail(error)
            raise

    @wrap(module.Worker, "update_weights")
    def update_weights(original, self, *args, **kwargs):
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            if updates := _updates(self):
                updates.fail(error)
            raise

    @wrap(module.Worker, "finish_weight_update")
    def finish_weight_update(original, self):
        updates = _updates(self)
        if updates is None or not self._weight_update_is_draft:
            return original(self)
        try:
            original(self)
        except BaseException as error:
            return updates.end(error)
        return updates.end(None)


def _updates(worker: Any) -> Any:
    """``HeadUpdates`` of a worker that drafts with P-EAGLE, else None."""
    from peagle_vllm.observer import drafter_of  # it imports torch

    return getattr(drafter_of(worker), "updates", None)
