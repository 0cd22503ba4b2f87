"""Tiny heads of every dialect, written from the facts of their formats.

The weights are only shapes: ones, but for ``mask_hidden`` and the vocabulary map, which are read.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from peagle_vllm.heads.target import Target

HIDDEN, INTERMEDIATE, VOCAB, DRAFT_VOCAB = 16, 24, 64, 48
LAYERS, HEAD_DIM = 2, 8
MASK_TOKEN = 60
TARGET = Target(name="some/target", hidden_size=HIDDEN, vocab_size=VOCAB, num_layers=8)
AUX = {3: [2, 4, 5], 4: [1, 3, 5, 7], 5: [1, 2, 4, 6, 8]}

Tensors = dict[str, torch.Tensor]


@dataclass
class Written:
    """A head before it is written: mutate it, then ``save``."""

    config: dict[str, Any]
    tensors: Tensors
    shards: int = 1

    @property
    def layer_config(self) -> dict[str, Any]:
        return self.config.get("transformer_layer_config", self.config)

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.shards == 1:
            save_file(self.tensors, folder / "model.safetensors")
            return folder
        names, weight_map = sorted(self.tensors), {}
        for i in range(self.shards):
            file = f"model-{i + 1:05}-of-{self.shards:05}.safetensors"
            part = {name: self.tensors[name] for name in names[i :: self.shards]}
            save_file(part, folder / file)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder


def tensors_of(family: str = "llama", num_aux: int = 3, draft_vocab: int = VOCAB, first: str = "layers.0") -> Tensors:
    """A head's weights under vLLM's names; ``first`` is what the dialect calls its first layer."""
    fc_in = num_aux * HIDDEN
    shapes = {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "fc.weight": (HIDDEN, fc_in),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (draft_vocab, HIDDEN),
        f"{first}.hidden_norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        layer = first if i == 0 else f"layers.{i}"
        for name in "qkv":
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (HIDDEN, HIDDEN if i else 2 * HIDDEN)
        shapes |= {
            f"{layer}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{layer}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
            f"{layer}.input_layernorm.weight": (HIDDEN,),
            f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        }
        if family == "qwen3":
            shapes |= {f"{layer}.self_attn.{part}_norm.weight": (HEAD_DIM,) for part in "qk"}
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    tensors["mask_hidden"] = torch.linspace(-1, 1, fc_in).view(1, 1, -1)
    if draft_vocab < VOCAB:
        chosen = torch.arange(VOCAB)[-draft_vocab:]
        tensors["d2t"] = chosen - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, chosen, True)
    return tensors


def layer_config(family: str = "llama") -> dict[str, Any]:
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


def speculators(family: str = "llama", num_aux: int = 3, draft_vocab: int = VOCAB) -> Written:
    config = {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": "peagle",
        "speculators_config": {
            "algorithm": "peagle",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 8}],
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer_config(family),
        "draft_vocab_size": draft_vocab,
        "eagle_aux_hidden_state_layer_ids": list(AUX[num_aux]),
        "mask_token_id": MASK_TOKEN,
        "norm_before_fc": False,
        "norm_before_residual": True,
        "fc_norm": False,
        "target_hidden_size": None,
    }
    if family == "llama" and num_aux != 3:  # what vLLM's Llama class wants to be told
        config["transformer_layer_config"]["num_aux_hidden_states"] = num_aux
    return Written(config, tensors_of(family, num_aux, draft_vocab))


def aws() -> Written:
    """Flat config, ``midlayer``, full vocabulary with an identity map all the same, vLLM's default aux layers."""
    own = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCAB, "ptd_token_id": MASK_TOKEN}
    tensors = tensors_of(first="midlayer")
    tensors |= {"d2t": torch.zeros(VOCAB, dtype=torch.long), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    return Written(layer_config() | own, tensors)


def flat(draft_vocab: int = DRAFT_VOCAB) -> Written:
    """What the AWS training code writes: the architecture of a plain Llama."""
    own = {"draft_vocab_size": draft_vocab, "ptd_token_id": MASK_TOKEN}
    return Written(layer_config() | own, tensors_of(draft_vocab=draft_vocab, first="midlayer"))


def vllm(family: str = "llama", draft_vocab: int = DRAFT_VOCAB) -> Written:
    """vLLM's own names, nothing in need of a mapping."""
    own = {
        "architectures": ["LlamaForCausalLMEagle3" if family == "llama" else "Eagle3Qwen3ForCausalLM"],
        "draft_vocab_size": draft_vocab,
        "mask_token_id": MASK_TOKEN,
        "eagle_aux_hidden_state_layer_ids": list(AUX[3]),
    }
    return Written(layer_config(family) | own, tensors_of(family, draft_vocab=draft_vocab))


def specforge(**fields: Any) -> Written:
    """No mask token id in its JSON, but where ``fields`` put one, as a user would."""
    own = {"architectures": ["PEagleDraftModel"], "draft_vocab_size": DRAFT_VOCAB} | fields
    return Written(layer_config() | own, tensors_of(draft_vocab=DRAFT_VOCAB))


def nemo(family: str = "llama") -> Written:
    own = {
        "architectures": ["LlamaEagle3DraftModel"],
        "draft_vocab_size": VOCAB,
        "mask_token_id": MASK_TOKEN,
        "num_depths": 8,
        "parallel_drafting": True,
    }
    tensors = tensors_of(family)
    top = ("lm_head.weight", "mask_hidden")
    return Written(
        layer_config(family) | own, {name if name in top else f"model.{name}": value for name, value in tensors.items()}
    )


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
