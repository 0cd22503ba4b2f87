"""Checks on a head that vLLM has loaded, for what its files could not show before."""

from typing import TYPE_CHECKING

import torch

from peagle_vllm.core.config import RefusedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_loaded_head(model: torch.nn.Module, vllm_config: "VllmConfig") -> None:
    """Refuse a loaded head whose learned hidden state would draft garbage in silence.

    Args:
        model: the draft model, as vLLM loaded it.
        vllm_config: for the head's name; a dummy load leaves ``mask_hidden`` zero and is let through.
    """
    name = vllm_config.speculative_config.draft_model_config.model
    mask_hidden = getattr(model, "mask_hidden", None)
    if mask_hidden is None:
        raise RefusedError(
            f"{name}: vLLM's {type(model).__name__} has no mask_hidden, so it cannot draft in parallel; "
            'remove "parallel_drafting" from the speculative config, or use a Llama or Qwen3 P-EAGLE head'
        )
    if not torch.isfinite(mask_hidden).all():
        raise RefusedError(f"{name}: mask_hidden holds NaN or Inf; take the head's weights from their source again")
    if not mask_hidden.any() and vllm_config.load_config.load_format != "dummy":
        raise RefusedError(
            f"{name}: mask_hidden is all zeros, so its drafts after the first would be garbage; "
            "take the head's weights from their source again, or train mask_hidden"
        )
