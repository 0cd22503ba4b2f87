"""Loads heads that name their tensors otherwise, carry a d2t without need or have fewer tokens than their target, and
refuses weights with NaN or Inf.
"""

import functools

from peagle_vllm.heads.config import TENSORS, vllm_name
from peagle_vllm.heads.vocabulary import OWN_VOCAB, with_all_rows
from peagle_vllm.patches.ledger import Patch, members
from peagle_vllm.serving import on_vllm_platform, refuse_broken

HEADS = {
    "vllm.model_executor.models.llama_eagle3": "Eagle3LlamaForCausalLM",
    "vllm.model_executor.models.qwen3_eagle3": "Eagle3Qwen3ForCausalLM",
}
METHODS = "__init__ combine_hidden_states forward compute_logits"

PATCH = Patch(
    name="head-weights",
    runner="both",
    # How a loaded head drafts, of which the drafters of both runners repeat parts.
    depends_on={module: members(name, METHODS) for module, name in HEADS.items()},
)


def load_weights(original, self, weights, *args, **kwargs):
    if getattr(self, "use_parallel_drafting", False) and on_vllm_platform():
        weights = ((vllm_name(name), tensor) for name, tensor in refuse_broken(weights))
        weights = with_all_rows(weights, self.config)
        # Also where vLLM built a map to more tokens: check_pair has refused a d2t that is not the identity.
        if self.draft_id_to_target_id is None or getattr(self.config, OWN_VOCAB, None) == self.config.draft_vocab_size:
            weights = ((name, tensor) for name, tensor in weights if "d2t" not in name)
        if updates := getattr(self, "peagle_updates", None):
            return updates.load(functools.partial(original, self, *args, **kwargs), weights)
        places = (self.model, "embed_tokens"), (self, "lm_head")  # of what vLLM may replace by the target's
        self.peagle_own_modules = [(parent, name, getattr(parent, name)) for parent, name in places]
    return original(self, weights, *args, **kwargs)


def init(original, self, *args, **kwargs):
    """vLLM learns from the loaded weights what the head has of its own; dummy weights do not say."""
    original(self, *args, **kwargs)
    for module in ("embed_tokens", "lm_head"):
        if any(f"{module}." in name for name in getattr(self.config, TENSORS, ())):
            setattr(self, f"has_own_{module}", True)


for _module, _head in HEADS.items():
    PATCH.wraps(_module, f"{_head}.load_weights")(load_weights)
    PATCH.wraps(_module, f"{_head}.__init__")(init)
