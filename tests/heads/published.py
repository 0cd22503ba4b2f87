"""A published head by its shapes alone: 3.6 GB on paper, a few kilobytes on disk.

Layers, widths, vocabulary, mask token and the tensors' names are those of amazon/GPT-OSS-20B-P-EAGLE. The size of the
MLP is not among the facts at hand; this one makes the published 3.6 GB.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, VOCAB, LAYERS, INTERMEDIATE = 2880, 201088, 4, 14336
HEADS, KV_HEADS, HEAD_DIM = 64, 8, 64
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "draft_vocab_size": VOCAB,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "max_position_embeddings": 131072,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "ptd_token_id": 201020,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "llama3",
    },
    "rope_theta": 150000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
}
BYTES = {"BF16": 2, "I64": 8, "BOOL": 1}  # of one number


def shapes() -> dict[str, tuple[str, list[int]]]:
    """Every tensor's dtype and shape, by its name in the file."""
    made = {
        "embed_tokens.weight": [VOCAB, HIDDEN],
        "fc.weight": [HIDDEN, 3 * HIDDEN],
        "lm_head.weight": [VOCAB, HIDDEN],
        "mask_hidden": [1, 1, 3 * HIDDEN],
        "midlayer.hidden_norm.weight": [HIDDEN],
        "norm.weight": [HIDDEN],
    }
    for i in range(LAYERS):
        layer, width = ("midlayer", 2 * HIDDEN) if i == 0 else (f"layers.{i}", HIDDEN)
        made |= {
            f"{layer}.input_layernorm.weight": [HIDDEN],
            f"{layer}.post_attention_layernorm.weight": [HIDDEN],
            f"{layer}.self_attn.q_proj.weight": [HEADS * HEAD_DIM, width],
            f"{layer}.self_attn.k_proj.weight": [KV_HEADS * HEAD_DIM, width],
            f"{layer}.self_attn.v_proj.weight": [KV_HEADS * HEAD_DIM, width],
            f"{layer}.self_attn.o_proj.weight": [HIDDEN, HEADS * HEAD_DIM],
            f"{layer}.mlp.gate_proj.weight": [INTERMEDIATE, HIDDEN],
            f"{layer}.mlp.up_proj.weight": [INTERMEDIATE, HIDDEN],
            f"{layer}.mlp.down_proj.weight": [HIDDEN, INTERMEDIATE],
        }
    weights = {name: ("BF16", shape) for name, shape in made.items()}
    return weights | {"d2t": ("I64", [VOCAB]), "t2d": ("BOOL", [VOCAB])}


def write_head(folder: Path) -> Path:
    """The head as a file full of holes: zeros all over, but for ``mask_hidden``."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    header, end = {}, 0
    for name, (dtype, shape) in sorted(shapes().items(), key=lambda item: (-BYTES[item[1][0]], item[0])):
        begin, end = end, end + int(np.prod(shape)) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        start = file.tell()
        file.truncate(start + end)
        begin, mask_end = header["mask_hidden"]["data_offsets"]
        file.seek(start + begin)
        file.write(b"\x80\x3f" * ((mask_end - begin) // 2))  # bf16 ones
    return folder
