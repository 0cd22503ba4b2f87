"""Folders with the real shapes of gpt-oss-20b and its heads, without weights: ``python benchmarks/shapes.py [FOLDER]``.

For benchmarks/suites/h200-synthetic.yaml, on machines that cannot reach a model hub. Shapes are those of the published
checkpoints; the tokenizer is made up (one word a token), since no text is read or written in earnest.
"""

import argparse
import json
from pathlib import Path
from typing import Any

VOCAB, HIDDEN, LAYERS = 201_088, 2880, 24
MASK_TOKEN = 201_020  # the published head's `ptd_token_id`
AUX_LAYERS = [2, LAYERS // 2, LAYERS - 3]

ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
ATTENTION = {"head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}

TARGET: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 131_072,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "rope_theta": 150_000,
    "rope_scaling": ROPE,
    "attention_bias": True,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
    **ATTENTION,
}


def head(layers: int, **more: Any) -> dict[str, Any]:
    """A Llama-shaped draft head of the target's width, full vocabulary."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "num_hidden_layers": layers,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "max_position_embeddings": 131_072,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": AUX_LAYERS,
        **ATTENTION,
        **more,
    }


FOLDERS = {
    "gpt-oss-20b-shape": TARGET,
    "eagle3-shape": head(1),
    "peagle-shape": head(4, ptd_token_id=MASK_TOKEN),
}


def write_tokenizer(folder: Path) -> None:
    """One word a token id, whole vocabulary: t0, t1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"t{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t0", "eos_token": "t1", "unk_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "data")
    where = parser.parse_args().folder
    for name, config in FOLDERS.items():
        (where / name).mkdir(parents=True, exist_ok=True)
        (where / name / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        print(where / name)
    write_tokenizer(where / "gpt-oss-20b-shape")


if __name__ == "__main__":
    main()
