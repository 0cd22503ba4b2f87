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
GEMMA4 = {
    "sliding_window": WINDOW,
    "layer_types": ALTERNATING,
    "global_head_dim": HEAD_DIM,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
}
VISION = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 2,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_HEADS,
    "head_dim": HEAD_DIM,
    "image_size": 32,
    "patch_size": 8,
}
IMAGE_TOKEN, IMAGE_ROWS = 508, (VISION["image_size"] // VISION["patch_size"]) ** 2
CONFIGS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "gpt_oss": {"sliding_window": WINDOW, "layer_types": ALTERNATING, "num_local_experts": 4} | EXPERTS,
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": INTERMEDIATE, "norm_topk_prob": True} | EXPERTS,
    "gemma4_text": GEMMA4,
    "gemma4": {"text_config": EVERY_LAYER | GEMMA4, "vision_config": VISION, "image_token_id": IMAGE_TOKEN},
    "llava": {
        "text_config": EVERY_LAYER | {"model_type": "llama"},
        "vision_config": VISION | {"model_type": "clip_vision_model"},
        "image_token_index": IMAGE_TOKEN,
    },
    "llama4_text": {
        "attention_chunk_size": WINDOW,
        "intermediate_size_mlp": INTERMEDIATE,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
    },
    # Targets that vLLM's CPU build cannot run beside any drafter.
    "deepseek_v2": {
        "num_key_value_heads": NUM_HEADS,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "first_k_dense_replace": TARGET_LAYERS,
    },
    "qwen3_next": {
        "num_experts": 4,
        "moe_intermediate_size": INTERMEDIATE,
        "shared_expert_intermediate_size": INTERMEDIATE,
        "layer_types": ["linear_attention", "full_attention"] * (TARGET_LAYERS // 2),
        "linear_key_head_dim": HEAD_DIM,
        "linear_value_head_dim": HEAD_DIM,
        "linear_num_key_heads": NUM_HEADS,
        "linear_num_value_heads": NUM_HEADS,
    }
    | EXPERTS,
}


def write(folder: Path, name: str) -> Path:
    """The target of one of ``CONFIGS``, with weights of a fixed seed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    options, images = CONFIGS[name], "vision_config" in CONFIGS[name]
    config = AutoConfig.for_model(name, **options if images else EVERY_LAYER | options)
    model = AutoModelForImageTextToText if images else AutoModelForCausalLM
    model.from_config(config).float().save_pretrained(folder / name)
    if name == "llava":
        _write_processor(folder / name)
    return folder / name


def _write_processor(folder: Path) -> None:
    """A tokenizer that knows the image token, and what cuts an image into patches."""
    from tokenizers import Tokenizer, models
    from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

    words = {f"<{i}>": i for i in range(VOCAB)} | {"<image>": IMAGE_TOKEN}
    words.pop(f"<{IMAGE_TOKEN}>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "<0>")))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = VISION["image_size"]
    image_processor = CLIPImageProcessor(size={"height": size, "width": size}, do_center_crop=False)
    LlavaProcessor(
        image_processor,
        tokenizer,
        patch_size=VISION["patch_size"],
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)


def greedy(target: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    """The prompt and the answer of ``count`` tokens that transformers gives."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    model = AutoModelForImageTextToText if "vision_config" in CONFIGS[target.name] else AutoModelForCausalLM
    ids = torch.tensor([prompt])
    answer = model.from_pretrained(target, dtype=torch.float32).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    return answer[0].tolist()
