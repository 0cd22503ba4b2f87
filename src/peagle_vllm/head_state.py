"""What P-EAGLE keeps of a loaded head, in one attribute of vLLM's model."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from peagle_vllm.updates import HeadUpdates


@dataclass
class PEagleState:
    """Of one ``Eagle3LlamaForCausalLM`` or ``Eagle3Qwen3ForCausalLM``.

    Attributes:
        own_modules: (parent, name, module) of what vLLM may replace by the target's; empty for dummy weights.
        updates: set once the drafter has the head.
        has_vllm_top_k: whether vLLM's ``get_top_k_tokens`` runs here; None until it was tried.
    """

    own_modules: list[tuple["nn.Module", str, "nn.Module"]] = field(default_factory=list)
    updates: "HeadUpdates | None" = None
    has_vllm_top_k: bool | None = None


def head_state(model: Any) -> PEagleState:
    """That of a head (``torch.nn.Module``)."""
    if not hasattr(model, "peagle_state"):
        model.peagle_state = PEagleState()
    return model.peagle_state
