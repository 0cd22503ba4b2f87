"""Checks on a head that vLLM has loaded, for what its files could not show before."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from peagle_vllm.core.config import RefusedError
from peagle_vllm.heads.checks import value_fault

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig


def refuse_mixed_windows(spec: "SpeculativeConfig") -> None:
    """Refuse a head with sliding and full layers, where the runner keeps one attention metadata for all (V1)."""
    hf_config = spec.draft_model_config.hf_config
    kinds = set((getattr(hf_config, "layer_types", None) or [])[: hf_config.num_hidden_layers])
    if len(kinds) > 1:
        raise RefusedError(
            f"P-EAGLE refused: layer_types names {' and '.join(sorted(kinds))} layers, and the V1 model runner drafts "
            f"with one kind only: {spec.draft_model_config.model}/config.json; use Model Runner V2 "
            "(VLLM_USE_V2_MODEL_RUNNER=1)"
        )


@torch.inference_mode()
def check_loaded_head(model: Any, vllm_config: "VllmConfig") -> None:
    """Refuse a loaded head whose learned hidden state would draft garbage in silence.

    Args:
        model: the draft model (``torch.nn.Module``), as vLLM loaded it.
        vllm_config: the served configuration. Dummy weights (``load_format="dummy"``) pass.
    """
    spec = vllm_config.speculative_config
    assert spec is not None
    name = spec.draft_model_config.model
    mask_hidden = getattr(model, "mask_hidden", None)
    if mask_hidden is None:
        raise RefusedError(
            f"P-EAGLE refused: vLLM's {type(model).__name__} has no mask_hidden, so {name} cannot draft in parallel; "
            'remove "parallel_drafting" from the speculative config, or use a Llama or Qwen3 P-EAGLE head'
        )
    if vllm_config.load_config.load_format == "dummy":
        return
    fault = value_fault(mask_hidden.float().cpu().numpy())
    if fault is None and not bool(model.combine_hidden_states(mask_hidden.view(1, -1)).isfinite().all()):
        fault = "fc makes NaN or Inf of mask_hidden"
    if fault:
        raise RefusedError(f"P-EAGLE refused: {fault}: {name}; take the head's weights from their source again")


def refuse_broken(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same (name, tensor) pairs; refused at the first one with NaN or Inf.

    As they are loaded, because a loaded layer may have packed its weights away.
    """
    for name, weight in weights:
        if not _is_finite(weight):
            raise RefusedError(
                f"P-EAGLE refused: {name} holds NaN or Inf: the head's weights; take them from their source again"
            )
        yield name, weight


def _is_finite(weight: torch.Tensor) -> bool:
    """Whether no value is NaN or Inf, without a second tensor as large. fp8 and whole numbers pass."""
    if not weight.is_floating_point() or weight.element_size() < 2 or not weight.numel():
        return True
    return bool(torch.stack(torch.aminmax(weight)).isfinite().all())
