"""vLLM's draft weight update tells the head's drafter when it begins, fails and ends."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from peagle_vllm.patches.ledger import Patch
from peagle_vllm.serving import RefusedError, is_peagle

PATCH = Patch(
    name="weight-update",
    runner="both",
    depends_on={
        # Which layers are half loaded, and how they are put back.
        "vllm.model_executor.model_loader.reload.types": ("LayerReloadingInfo",),
        "vllm.model_executor.model_loader.reload.layerwise": (
            "initialize_layerwise_reload",
            "finalize_layerwise_processing",
        ),
    },
)


@PATCH.wraps("vllm.v1.worker.gpu_worker", "Worker._set_draft_weight_update_target")
def _set_draft_weight_update_target(original, self, *args, **kwargs):
    if is_peagle(self.vllm_config) and self.vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise RefusedError("a draft weight update needs pipeline_parallel_size=1: the last stage alone has the head")
    original(self, *args, **kwargs)
    if updates := _updates(self):
        updates.begin()


@PATCH.wraps("vllm.v1.worker.gpu_worker", "Worker._start_weight_update")
def _start_weight_update(original, self, *args, **kwargs):
    is_first = is_peagle(self.vllm_config) and not self._weight_update_active  # else another update goes on
    with _failing(self) if is_first else nullcontext():
        return original(self, *args, **kwargs)


@PATCH.wraps("vllm.v1.worker.gpu_worker", "Worker.update_weights")
def update_weights(original, self, *args, **kwargs):
    with _failing(self):
        return original(self, *args, **kwargs)


@PATCH.wraps("vllm.v1.worker.gpu_worker", "Worker.finish_weight_update")
def finish_weight_update(original, self, *args, **kwargs):
    updates = _updates(self)
    if updates is None or not self._weight_update_is_draft:
        return original(self, *args, **kwargs)
    try:
        original(self, *args, **kwargs)
    except BaseException as error:
        return updates.end(error)
    return updates.end(None)


@contextmanager
def _failing(worker: Any) -> Iterator[None]:
    """An error that is raised meanwhile fails the update."""
    try:
        yield
    except BaseException as error:
        if updates := _updates(worker):
            updates.fail(error)
        raise


def _updates(worker: Any) -> Any:
    """``HeadUpdates`` of a worker that drafts with P-EAGLE, else None."""
    from peagle_vllm.observer import drafter_of  # it imports torch

    return getattr(drafter_of(worker), "updates", None)
