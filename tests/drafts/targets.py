"""Random tiny targets of other architectures, written by transformers from a config alone."""

from pathlib import Path
from typing import Any

from tests.support.random_heads import HEAD_DIM, INTERMEDIATE, NUM_HEADS, SIZES, TARGET_LAYERS, VOCAB

WINDOW = 32  # tokens that a sliding layer of these targets sees
EVERY_LAYER = SIZES | {"num_hidden_layers": TARGET_LAYERS, "pad_token_id": 0}
EVERY_LAYER |= {"initializer_range": 0.2}  # candidates apart by more than rounding errors
ALTERNATING = ["sliding_attention", "full_attention"] * (TARGET_LAYERS // 2)
EXPERTS = {"num_experts_per_tok": 2}
GEMMA4 = {"sliding_window": WINDOW, "layer_types": ALTERNATING, "global_head_dim": HEAD_DIM}
GEMMA4 |= {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
LLAMA4 = {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
LLAMA4 |= {"attention_chunk_size": WINDOW, "intermediate_size_mlp": INTERMEDIATE}
DEEPSEEK = {"num_key_value_heads": NUM_HEADS, "kv_lora_rank": 512, "q_lora_rank": None}
DEEPSEEK |= {"first_k_dense_replace": TARGET_LAYERS}
DEEPSEEK |= dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 64)
VISION = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")}
VISION |= {"num_key_value_heads": NUM_HEADS, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8}
IMAGE_TOKEN, IMAGE_TOKENS = 508, 70  # the fewest that Gemma 4 makes of an image
NAMES = ("image_token", "boi_token", "eoi_token", "audio_token", "boa_token", "eoa_token")
AROUND_IMAGES = {name: IMAGE_TOKEN - i for i, name in enumerate(NAMES)}
CONFIGS: dict[str, dict[str, Any]] = {  # of text alone
    "mistral": {"sliding_window": WINDOW},
    "gpt_oss": {"sliding_window": WINDOW, "layer_types": ALTERNATING, "num_local_experts": 4} | EXPERTS,
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": INTERMEDIATE, "norm_topk_prob": True} | EXPERTS,
    "gemma4_text": GEMMA4,
    "llama4_text": LLAMA4,
    "deepseek_v2": DEEPSEEK,  # vLLM's CPU build runs it, and no drafter of another attention beside it
}


WITH_IMAGES: dict[str, dict[str, Any]] = {
    "gemma4": {
        **{key: EVERY_LAYER[key] for key in ("initializer_range", "tie_word_embeddings")},
        "text_config": EVERY_LAYER | GEMMA4,
        "vision_config": VISION | {"default_output_length": IMAGE_TOKENS},
        **{f"{name}_id": token for name, token in AROUND_IMAGES.items()},
        "eoa_token_index": AROUND_IMAGES["eoa_token"],
        "video_token_id": VOCAB - 1,
    },
    "llava": {
        "text_config": EVERY_LAYER | {"model_type": "llama"},
        "vision_config": VISION | {"model_type": "clip_vision_model"},
        "image_token_index": IMAGE_TOKEN,
    },
}


def write(folder: Path, name: str) -> Path:
    """The target of one of ``CONFIGS`` or ``WITH_IMAGES``, with weights of a fixed seed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    if name in CONFIGS:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **EVERY_LAYER | CONFIGS[name]))
    else:
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, **WITH_IMAGES[name]))
    model.float().save_pretrained(folder / name)
    if name in WITH_IMAGES:
        _write_processor(folder / name)
    return folder / name


def _write_processor(folder: Path) -> None:
    """A tokenizer that knows the tokens around an image, and what cuts an image into patches. Needs torchvision."""
    import transformers
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer, models

    named = {token: f"<{name}>" for name, token in AROUND_IMAGES.items()} | {VOCAB - 1: "<|video|>"}
    words = {named.get(i, f"<{i}>"): i for i in range(VOCAB)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "<0>")),
        pad_token="<0>",
        extra_special_tokens={name: named[token] for name, token in AROUND_IMAGES.items()},
    )
    if folder.name == "gemma4":
        parts = (
            transformers.Gemma4AudioFeatureExtractor(),
            transformers.Gemma4ImageProcessor(patch_size=VISION["patch_size"], max_soft_tokens=IMAGE_TOKENS),
        )
        processor = transformers.Gemma4Processor(*parts, tokenizer, transformers.Gemma4VideoProcessor())
    else:
        size = dict.fromkeys(("height", "width"), VISION["image_size"])
        processor = transformers.LlavaProcessor(
            transformers.CLIPImageProcessor(size=size, crop_size=size),
            tokenizer,
            patch_size=VISION["patch_size"],
            vision_feature_select_strategy="default",
            image_token=named[IMAGE_TOKEN],
            num_additional_image_tokens=1,
        )
        file = folder / "model.safetensors"  # vLLM knows the names of older transformers
        old = "vision_tower.vision_model."
        save_file({name.replace("vision_tower.", old): w for name, w in load_file(file).items()}, file)
    processor.save_pretrained(folder)


def image() -> Any:
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8))
