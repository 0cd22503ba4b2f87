"""A head whose target has more tokens than it: the target's vocabulary was padded, or tokens were added to it.

The head drafts its own tokens, the target's first ones. In its own embeddings and selector the others are zeros.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from peagle_vllm.heads.files import SELECTOR
from peagle_vllm.heads.head import Head
from peagle_vllm.heads.target import Target, Token, find_token

if TYPE_CHECKING:
    import torch

OWN_VOCAB = "head_vocab_size"  # put on a served head's config: its own ``vocab_size``, where the target's is larger
BY_TARGET_ID = ("embed_tokens.weight", f"{SELECTOR}.predecessor_codebook")  # tensors with a row for each target id


def prefix_fault(head: Head, target: Target, tokens: dict[int, Token]) -> str | None:
    """Why the head's tokens cannot be the first of its target's, or its mask token is one of the target's text."""
    for i, token in tokens.items():
        if i >= head.vocab_size and token.kind == "ordinary":
            return f"token {i} of {target.name}, {token.text!r}, was not added to the head's tokens"
    mask = find_token(tokens, head.mask_token_id)
    if mask and mask.kind in ("in use", "ordinary"):
        return f"the text of {target.name} uses the head's mask token {mask.id}, {mask.text!r}"
    return None


def with_all_rows(
    weights: "Iterable[tuple[str, torch.Tensor]]", hf_config: Any
) -> "Iterator[tuple[str, torch.Tensor]]":
    """The same (name, tensor) pairs, with rows of zeros for the target's tokens that the head does not have."""
    size = getattr(hf_config, OWN_VOCAB, None)
    for name, tensor in weights:
        if name in BY_TARGET_ID and len(tensor) == size:
            whole = tensor.new_zeros(hf_config.vocab_size, *tensor.shape[1:])
            whole[:size] = tensor
            yield name, whole
        else:
            yield name, tensor
