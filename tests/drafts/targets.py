"""Random tiny targets of other architectures, written by transformers from a config alone."""

from pathlib import Path
from typing import Any

from tests.tiny_heads import (
    HEAD_DIM,
    HIDDEN,
    INTERMEDIATE,
    MAX_POSITIONS,
    NUM_HEADS,
    NUM_KV_HEADS,
    TARGET_LAYERS,
    VOCAB,
)

WINDOW = 32  # tokens that a sliding layer of these targets sees
EVERY_LAYER = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": TARGET_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,  # candidates apart by more than rounding errors
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ALTERNATING = ["sliding_attention", "full_attention"] * (TARGET_LAYERS // 2)
EXPERTS = {"num_experts_per_tok": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "gpt_oss": {"sliding_window": WINDOW, "layer_types": ALTERNATING, "num_local_experts": 4} | EXPERTS,
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": INTERMEDIATE, "norm_topk_prob": True} | EXPERTS,
    "gemma4_text": {
        "sliding_window": WINDOW,
        "layer_types": ALTERNATING,
        "global_head_dim": HEAD_DIM,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },
}


def write(folder: Path, name: str) -> Path:
    """The target of one of ``CONFIGS``, with weights of a fixed seed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **EVERY_LAYER | CONFIGS[name])
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder / name)
    return folder / name
