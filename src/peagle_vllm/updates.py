"""New weights for a head that is served: vLLM's draft weight update, or calls of the draft model's ``load_weights``."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from peagle_kernels.select_candidates import CandidateSelector
from peagle_vllm.heads.config import TENSORS
from peagle_vllm.heads.files import SELECTOR
from peagle_vllm.heads.selector import named_tensors
from peagle_vllm.serving import RefusedError, logger, on_all_ranks, warn_once

Weights = Iterable[tuple[str, torch.Tensor]]
MASK_HIDDEN = "mask_hidden"
OPTIONAL = ("d2t", "t2d", "embed_tokens", "lm_head", "inv_freq")  # what trainers freeze, and need not publish


class HeadUpdates:
    """What happens to a served head, and to its drafts, when new weights come.

    Outside of a draft weight update ``load_weights`` counts at once.
    ``mask_is_stale``: a projected ``mask_hidden`` must be computed again; whoever does it sets this back.
    """

    def __init__(
        self, model: Any, target: torch.nn.Module, selector: CandidateSelector | None, vllm_config: VllmConfig
    ):
        """``model`` is the loaded head."""
        self._model, self._selector = model, selector
        self._config = vllm_config.speculative_config.draft_model_config
        targets = set(target.modules())
        targets.update(copy for copy, source in _quantized_copies() if source in targets)
        _share_alike(model, targets)
        self.own_modules = [module for module in model.modules() if module not in targets]
        self._shared = [
            (parent, *child) for parent in self.own_modules for child in parent.named_children() if child[1] in targets
        ]
        # Written in place, because CUDA graphs read them. vLLM would lose a mask_hidden that comes in an update.
        self._ours = {MASK_HIDDEN: model.mask_hidden} | (named_tensors(selector) if selector else {})
        if model.draft_id_to_target_id is not None:  # of a head, sleep at level 2 keeps only buffers
            model.register_buffer("d2t_to_keep", model.draft_id_to_target_id.data, persistent=False)
        names = getattr(self._config.hf_config, TENSORS, ())
        self._needed = {name for name in names if not any(optional in name for optional in OPTIONAL)}
        self._arrived: set[str] = set()
        self._staged: dict[str, torch.Tensor] = {}
        self._is_open = False  # from begin to end of a draft weight update of vLLM: the head's layers are in parts
        self._has_failed = False  # the last update, and not every tensor has come since
        self.mask_is_stale, self._is_selecting = True, selector is not None
        model.peagle_updates = self  # its ``load_weights`` comes here from now on (patch ``head-weights``)

    @property
    def paused(self) -> bool:
        """Whether to draft nothing now."""
        return self._is_open or self._has_failed

    def begin(self) -> None:
        """A draft weight update begins. The target's modules leave the head, or vLLM would take them apart, too."""
        for parent, name, _ in self._shared:
            parent._modules.pop(name, None)
        self._arrived.clear()
        self._staged.clear()
        self._is_open = True

    def end(self, error: BaseException | None) -> None:
        """It has ended, with ``error`` or without. Raises RefusedError where tensors are missing."""
        must_be_whole = self._arrived or self._has_failed
        missing = sorted(self._needed - self._arrived) if must_be_whole else []
        if missing and not error:
            error = RefusedError(f"the update of the head's weights lacks {', '.join(missing)}")
        everywhere = on_all_ranks(error is None)
        if error:
            self.fail(error)
            raise error
        if not everywhere:  # no error here: after one, vLLM's executor would read no other rank's answer
            self.fail(RefusedError("it failed on another rank"))
            return
        self._close()
        self._apply()

    def fail(self, error: BaseException) -> None:
        """Give up an update that has begun, and leave no half loaded layer, which would spoil the next one in vLLM."""
        if not self._is_open:
            return
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = info.load_numel_total = 0
        finalize_layerwise_reload(self._model, self._config)
        self._close()
        self._stop(error)

    def load(self, load_weights: Callable[[Weights], None], weights: Weights) -> None:
        """``load_weights`` of any tensors of a served head and its selector. RefusedError at one of another shape."""
        self._model.use_parallel_drafting = False  # else vLLM refuses a part that lacks mask_hidden
        try:
            load_weights(self._take_ours(weights))
        except BaseException as error:
            if not self._is_open:
                self._stop(error)
            raise
        finally:
            self._model.use_parallel_drafting = True
        if not self._is_open:
            self._apply()

    def _take_ours(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        shared = {name for _, name, _ in self._shared}
        for name, tensor in weights:
            ours, of_selector = self._ours.get(name), name.startswith(f"{SELECTOR}.")
            if not of_selector:
                self._arrived.add(name)
            if ours is not None:
                if tensor.squeeze().shape != ours.squeeze().shape:
                    raise RefusedError(f"{name} is {list(tensor.shape)}, this head needs {list(ours.shape)}")
                self._staged[name] = tensor.to(ours.device, ours.dtype, copy=True)  # its memory is the transfer's
            elif of_selector:
                warn_once(f"P-EAGLE ignores {SELECTOR}.*: the served head has no selector")
            elif taken := shared.intersection(name.split(".")):
                warn_once(f"P-EAGLE ignores new weights of {taken.pop()}: the head shares the target's")
            else:
                yield name, tensor

    def _close(self) -> None:
        self._is_open = False
        for parent, name, child in self._shared:
            parent._modules[name] = child

    def _stop(self, error: BaseException) -> None:
        self._has_failed = True
        self._arrived.clear()
        self._staged.clear()
        logger.warning(
            "P-EAGLE drafts zeros until a whole update of the head's weights succeeds; the last one failed: %s: %s",
            type(error).__name__,
            str(error).partition("\n")[0],
        )

    def _apply(self) -> None:
        """What has come takes effect. New weights of the head without a new selector turn the selector off."""
        lacking = sorted(self._ours.keys() - {MASK_HIDDEN} - self._staged.keys())
        for name in self._staged.keys() & ({MASK_HIDDEN} if lacking else self._ours.keys()):
            self._ours[name].copy_(self._staged.pop(name).view(self._ours[name].shape))
        if self._selector and not lacking:
            self._is_selecting = True
        elif self._selector and self._arrived and self._is_selecting:
            self._is_selecting = False
            self._selector.edge_scale.zero_()  # in place: a CUDA graph continues to read these scales
            self._selector.unary_scale.fill_(1)
            logger.warning("P-EAGLE drafts without the candidate selector until its new tensors come: %s", lacking)
        if not self._has_failed or self._needed <= self._arrived:
            self._has_failed = False
            self._arrived.clear()
        self.mask_is_stale = True


def _share_alike(model: Any, targets: set[torch.nn.Module]) -> None:
    """Give the head its own module back where vLLM put the target's there on some ranks only.

    Each tensor parallel rank compares its own shard (vLLM issue 50158).
    """
    for parent, name, own_module in model.__dict__.pop("peagle_own_modules", ()):  # none of dummy weights
        is_shared = getattr(parent, name) in targets
        if not on_all_ranks(is_shared) and is_shared:
            setattr(parent, name, own_module)


def _quantized_copies() -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """Copies of an lm_head and what they are of (``draft_lm_head_quantization``, since vLLM 0.33)."""
    try:
        from vllm.model_executor.layers.quantization.online.lm_head import _SOURCES  # type: ignore[import-not-found]
    except ImportError:
        return []
    return [(copy, source) for copy, (source, _) in _SOURCES.items()]
