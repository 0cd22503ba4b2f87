"""Models by their shapes alone, without weights or a hub; the benchmarks serve them with ``load_format="dummy"``."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PEAGLE_LAYERS, EAGLE3_LAYERS = 4, 1
NUM_AUX = 3  # captured hidden states


@dataclass(frozen=True)
class Model:
    """Shapes of a decoder-only model, by their names in config.json; whatever else one says changes no time."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_hidden_layers: int
    vocab_size: int

    def config(self) -> dict[str, Any]:
        """A config.json with these shapes: a Llama."""
        llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 131072}
        return {**llama, **asdict(self), "dtype": "bfloat16"}


@dataclass(frozen=True)
class HeadShape:
    """A drafter and its target."""

    target: Model  # hidden size and vocabulary are the head's as well
    intermediate: int  # of the head's MLP

    def layers(self, parallel: bool) -> int:
        """Of the P-EAGLE head, or of an EAGLE-3 head."""
        return PEAGLE_LAYERS if parallel else EAGLE3_LAYERS

    def config(self, parallel: bool) -> dict[str, Any]:
        """A P-EAGLE head's config.json, or that of an EAGLE-3 head of the same width."""
        of_layers = self.target.config() | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers(parallel),
            "draft_vocab_size": self.target.vocab_size,
            "target_hidden_size": self.target.hidden_size,
        }
        return of_layers | ({"ptd_token_id": self.target.vocab_size - 1} if parallel else {})

    def weights(self, parallel: bool) -> dict[str, int]:
        """Elements that one draft step reads of each part: {"fc", "layers", "lm_head"}; norms are left out."""
        t = self.target
        attention = (t.num_attention_heads + 2 * t.num_key_value_heads) * t.head_dim
        first_qkv, qkv = 2 * t.hidden_size * attention, t.hidden_size * attention
        rest = t.num_attention_heads * t.head_dim * t.hidden_size + 3 * t.hidden_size * self.intermediate
        layers = self.layers(parallel)
        return {
            "fc": NUM_AUX * t.hidden_size * t.hidden_size,
            "layers": first_qkv + (layers - 1) * qkv + layers * rest,
            "lm_head": t.vocab_size * t.hidden_size,
        }


def write_config(folder: Path, config: dict[str, Any]) -> str:
    """A model folder that vLLM can serve with dummy weights; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return str(folder)


# Eight layers: the fewest with room for the default aux layers. The target's own speed plays no part in a draft step.
GPT_OSS = Model(2880, 2880, 64, 8, 64, 8, 201_088)
# As amazon/GPT-OSS-20B-P-EAGLE: 4 layers, the whole vocabulary, 3 hidden states; this intermediate size, which its card
# does not name, makes its 1.8e9 weights (3.6 GB).
GPT_OSS_HEAD = HeadShape(GPT_OSS, 14336)
TINY_HEAD = HeadShape(Model(64, 96, 2, 1, 32, 8, 512), 96)

# Of the published model, for whole engines. The rest of its config.json (RoPE scaling, sliding windows, SwiGLU's limit)
# is GptOssConfig's own default.
GPT_OSS_20B: dict[str, Any] = json.loads(Path(__file__).with_name("gpt-oss-20b.json").read_text())
