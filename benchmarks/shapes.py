"""Models by their shapes alone, without weights or a hub; the benchmarks serve them with ``load_format="dummy"``."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NUM_AUX = 3  # captured hidden states
BF16 = 2  # bytes


@dataclass(frozen=True)
class HeadShape:
    """Shapes of a drafter, by their names in config.json; whatever else one says changes no time."""

    hidden_size: int  # the target's as well
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    def num_layers(self, parallel: bool) -> int:
        """Of the P-EAGLE head, or of an EAGLE-3 head."""
        return 4 if parallel else 1

    def config(self, parallel: bool) -> dict[str, Any]:
        """A P-EAGLE head's config.json, or that of an EAGLE-3 head of the same width."""
        return {
            **llama("LlamaForCausalLMEagle3", self.num_layers(parallel), **asdict(self)),
            "draft_vocab_size": self.vocab_size,
            "target_hidden_size": self.hidden_size,
            **({"ptd_token_id": self.vocab_size - 1} if parallel else {}),
        }

    def step_bytes(self, k: int, batch: int, *, parallel: bool) -> int:
        """Bytes to and from the device's memory in the draft step of ``batch`` requests, K drafts each, all decoding.

        Weights once a forward (norms, biases and embedding rows left out). P-EAGLE (``parallel``): one forward, of 2K
        rows a request in the layers, K + 1 in ``fc``. EAGLE-3: K forwards of one layer, of one row a request each
        (vLLM's first has K + 1). Whatever was accepted; keys, values and logits are left out.
        """
        qkv = self.hidden_size * (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim
        rest = self.num_attention_heads * self.head_dim * self.hidden_size
        rest += 3 * self.hidden_size * self.intermediate_size
        layers = qkv + self.num_layers(parallel) * (qkv + rest)  # the first one's qkv is twice as wide
        forwards = 1 if parallel else k
        weights = NUM_AUX * self.hidden_size**2 + forwards * (layers + self.vocab_size * self.hidden_size)
        captured, rows = (batch * (k + 1), 2 * batch * k) if parallel else (batch, batch * k)
        return BF16 * (weights + (NUM_AUX * captured + rows) * self.hidden_size)


def llama(architecture: str, num_layers: int, **shapes: int) -> dict[str, Any]:
    more = {"num_hidden_layers": num_layers, "max_position_embeddings": 131072, "dtype": "bfloat16"}
    return {"architectures": [architecture], "model_type": "llama", **shapes, **more}


def write_config(folder: Path, config: dict[str, Any]) -> str:
    """A model folder that vLLM can serve with dummy weights; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return str(folder)


# As amazon/GPT-OSS-20B-P-EAGLE: 4 layers, the whole vocabulary, 3 hidden states; this intermediate size, which its card
# does not name, makes its 1.8e9 weights (3.6 GB).
GPT_OSS_HEAD = HeadShape(2880, 14336, 64, 8, 64, 201_088)
# Of the published model. The rest of its config.json (RoPE scaling, sliding windows, SwiGLU's limit) is GptOssConfig's
# own default.
GPT_OSS_20B: dict[str, Any] = json.loads(Path(__file__).with_name("gpt-oss-20b.json").read_text())
TINY_HEAD = HeadShape(64, 96, 2, 1, 32, 512)
TINY = llama("LlamaForCausalLM", 8, **asdict(TINY_HEAD))  # as many layers as the default aux layers need
