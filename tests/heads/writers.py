"""Tiny heads of every dialect, written from the facts of their formats.

The weights are only shapes: ones, but for ``mask_hidden`` and the vocabulary map, which are read.
"""

from typing import Any

import torch

from peagle_vllm.heads.target import Target
from tests.support.dialects import AUX_KEY, Tensors, Written, as_aws, as_flat, as_nemo, as_specforge, as_speculators

HIDDEN, INTERMEDIATE, VOCAB, DRAFT_VOCAB = 16, 24, 64, 48
LAYERS, HEAD_DIM = 2, 8
MASK_TOKEN = 60
TARGET = Target(name="some/target", hidden_size=HIDDEN, vocab_size=VOCAB, num_layers=8)
AUX = {3: [2, 4, 5], 4: [1, 3, 5, 7], 5: [1, 2, 4, 6, 8]}


def tensors_of(family: str, num_aux: int, draft_vocab: int) -> Tensors:
    """A head's weights under vLLM's names."""
    fc_in = num_aux * HIDDEN
    shapes = {
        "embed_tokens": (VOCAB, HIDDEN),
        "fc": (HIDDEN, fc_in),
        "norm": (HIDDEN,),
        "lm_head": (draft_vocab, HIDDEN),
        "layers.0.hidden_norm": (HIDDEN,),
    }
    for i in range(LAYERS):
        of_layer = {
            **dict.fromkeys(("q_proj", "k_proj", "v_proj"), (HIDDEN, HIDDEN if i else 2 * HIDDEN)),
            "o_proj": (HIDDEN, HIDDEN),
            **(dict.fromkeys(("q_norm", "k_norm"), (HEAD_DIM,)) if family == "qwen3" else {}),
        }
        shapes |= {f"layers.{i}.self_attn.{name}": shape for name, shape in of_layer.items()}
        shapes |= {f"layers.{i}.mlp.{name}_proj": (INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
        shapes[f"layers.{i}.mlp.down_proj"] = (HIDDEN, INTERMEDIATE)
        shapes |= {f"layers.{i}.{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")}
    tensors = {f"{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    tensors["mask_hidden"] = torch.linspace(-1, 1, fc_in).view(1, 1, -1)
    if draft_vocab < VOCAB:
        chosen = torch.arange(VOCAB)[-draft_vocab:]
        tensors["d2t"] = chosen - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, chosen, True)
    return tensors


def layer_config(family: str) -> dict[str, Any]:
    return {
        "model_type": family,
        "architectures": ["LlamaForCausalLM" if family == "llama" else "Qwen3ForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HIDDEN // HEAD_DIM,
        "num_key_value_heads": HIDDEN // HEAD_DIM,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    }


def vllm(family: str = "llama", draft_vocab: int = DRAFT_VOCAB, num_aux: int | None = 3) -> Written:
    """vLLM's own names, nothing in need of a mapping.

    Args:
        num_aux: None: aux layers are not named, so they are vLLM's default.
    """
    fields = {
        "architectures": ["LlamaForCausalLMEagle3" if family == "llama" else "Eagle3Qwen3ForCausalLM"],
        "draft_vocab_size": draft_vocab,
        "mask_token_id": MASK_TOKEN,
    }
    fields |= {AUX_KEY: list(AUX[num_aux])} if num_aux else {}
    return Written(layer_config(family) | fields, tensors_of(family, num_aux or 3, draft_vocab))


def speculators(family: str = "llama", num_aux: int = 3, draft_vocab: int = VOCAB) -> Written:
    head = vllm(family, draft_vocab, num_aux)
    head.config |= {"fc_norm": False, "norm_before_fc": False, "norm_before_residual": True}
    as_speculators(head, TARGET.name)
    if family == "llama" and num_aux != 3:  # what vLLM's Llama class wants to be told
        head.layer_config["num_aux_hidden_states"] = num_aux
    return head


def aws() -> Written:
    return as_aws(vllm(draft_vocab=VOCAB, num_aux=None))


def flat() -> Written:
    return as_flat(vllm(num_aux=None))


def specforge(**fields: Any) -> Written:
    """No mask token id in its JSON, but where ``fields`` put one, as a user would."""
    head = as_specforge(vllm(num_aux=None))
    head.config |= fields
    return head


def nemo(family: str = "llama") -> Written:
    return as_nemo(vllm(family, VOCAB, num_aux=None))


def eagle3() -> Written:
    """An EAGLE-3 head: it cannot draft in parallel."""
    head = vllm()
    del head.config["mask_token_id"], head.tensors["mask_hidden"]
    return head


# Heads that vLLM 0.32 loads as they are, or with what this package maps.
SERVED = {
    "speculators-llama": speculators,
    "speculators-qwen3": lambda: speculators("qwen3"),
    "speculators-reduced": lambda: speculators(draft_vocab=DRAFT_VOCAB),
    "speculators-llama-4-aux": lambda: speculators(num_aux=4),
    "speculators-qwen3-5-aux": lambda: speculators("qwen3", num_aux=5),
    "aws": aws,
    "flat": flat,
    "vllm-llama": vllm,
    "vllm-qwen3": lambda: vllm("qwen3"),
    "nemo": nemo,
    "nemo-qwen3": lambda: nemo("qwen3"),
    "specforge-with-id": lambda: specforge(mask_token_id=MASK_TOKEN),
}
# Heads that need a conversion first.
FOREIGN = {"specforge": specforge}
