"""Is a vLLM configuration P-EAGLE, and may the loaded head be served? Imports neither vLLM nor torch by itself."""

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.config import SpeculativeConfig, VllmConfig

logger = logging.getLogger("vllm.peagle")  # under vLLM's own handler


class RefusedError(RuntimeError):
    """A P-EAGLE configuration that must not be served; the message is one line.

    No ValueError, because pydantic would wrap that into a message of several lines.
    """

    def __str__(self) -> str:
        return f"P-EAGLE refused: {super().__str__()}"


def is_peagle(vllm_config: "VllmConfig") -> bool:
    """Whether this configuration drafts with a P-EAGLE head."""
    return is_peagle_spec(vllm_config.speculative_config)


def is_peagle_spec(spec: "SpeculativeConfig | None") -> bool:
    """The same of a ``SpeculativeConfig``. DFlash and DSpark draft in parallel too, by their own methods."""
    return spec is not None and spec.method == "eagle3" and bool(spec.parallel_drafting) and on_vllm_platform()


def on_vllm_platform() -> bool:
    """Whether the platform is one of vLLM's own: CPU, CUDA, ROCm, XPU.

    Any other (a plugin such as vllm-ascend, the TPU's) brings workers and model runners of its own, and keeps its own
    behaviour. The platform is known before vLLM builds a configuration, the worker class it picks only in the midst.
    """
    from vllm.platforms import current_platform

    return type(current_platform).__module__.partition(".")[0] == "vllm"


def has_dummy_weights(vllm_config: "VllmConfig") -> bool:
    """Whether the head's weights are dummies, by its own ``draft_load_config`` where it has one."""
    from vllm.model_executor.model_loader.utils import get_draft_load_config

    return get_draft_load_config(vllm_config).load_format == "dummy"


def check_loaded_head(model: Any, vllm_config: "VllmConfig") -> None:
    """Refuse a loaded head whose learned hidden state would give useless drafts without any error.

    Args:
        model: the draft model (``torch.nn.Module``), as vLLM loaded it.
        vllm_config: the served configuration. Dummy weights of the head pass.

    Raises:
        RefusedError: the head has no ``mask_hidden``, or one that is zero, NaN or Inf, before or after ``fc``.
    """
    import torch

    from peagle_vllm.heads.check_weights import value_fault

    name = vllm_config.speculative_config.draft_model_config.model
    mask_hidden = getattr(model, "mask_hidden", None)
    if mask_hidden is None:
        what = f"vLLM's {type(model).__name__} has no mask_hidden, so {name} cannot draft in parallel"
        raise RefusedError(f'{what}; remove "parallel_drafting" from the speculative config, or use another head')
    if has_dummy_weights(vllm_config):
        return
    with torch.inference_mode():
        fault = value_fault(mask_hidden.float().cpu().numpy())
        if fault is None and not bool(model.combine_hidden_states(mask_hidden.view(1, -1)).isfinite().all()):
            fault = "fc makes NaN or Inf of mask_hidden"
    if fault:
        raise RefusedError(f"{fault}: {name}; take the head's weights from their source again")


def refuse_broken(weights: "Iterable[tuple[str, torch.Tensor]]") -> "Iterator[tuple[str, torch.Tensor]]":
    """The same (name, tensor) pairs; ``RefusedError`` at the first one with NaN or Inf.

    Checked while they are loaded, because some layers repack their weights afterwards.
    """
    for name, weight in weights:
        if not _is_finite(weight):
            raise RefusedError(f"{name} holds NaN or Inf: the head's weights; take them from their source again")
        yield name, weight


def _is_finite(weight: "torch.Tensor") -> bool:
    """Whether no value is NaN or Inf, without a second tensor as large. fp8 and whole numbers pass."""
    import torch

    if not weight.is_floating_point() or weight.element_size() < 2 or not weight.numel():
        return True
    return bool(torch.stack(torch.aminmax(weight)).isfinite().all())
