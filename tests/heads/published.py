"""A head as large as a published one, 3.6 GB on paper, a few kilobytes on disk: sizes as amazon/GPT-OSS-20B-P-EAGLE."""

import json
import math
from pathlib import Path
from typing import Any

from peagle_vllm.heads.check_weights import expected_shapes
from peagle_vllm.heads.head import read_head

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 14336,  # the size of the MLP is not among the facts at hand; this one makes 3.6 GB
    "num_attention_heads": 64,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "ptd_token_id": 201020,
    "rope_theta": 150000.0,
    "vocab_size": 201088,
}


def write_head(folder: Path) -> Path:
    """The head as a file full of holes: bf16 zeros all over, but for ``mask_hidden``."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes = {name: shape for name, shape in expected_shapes(read_head(folder)).items() if "input_norm" not in name}
    header, end = {}, 0
    for name, shape in (shapes | {"mask_hidden": (3 * CONFIG["hidden_size"],)}).items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.seek(begin, 1)
        file.write(b"\x80\x3f" * ((end - begin) // 2))  # bf16 ones
    return folder
