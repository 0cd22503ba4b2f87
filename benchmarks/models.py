"""Targets and heads by their shapes alone, for ``load_format="dummy"``: no weights, no tokenizer, no network."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import shapes

PEAGLE_LAYERS, EAGLE3_LAYERS = 4, 1


@dataclass(frozen=True)
class Model:
    """Shapes of a decoder-only model, Llama unless ``extra`` says otherwise."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int

    def config(self) -> dict[str, Any]:
        """vLLM's reading of it: a Llama."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocab,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "dtype": "bfloat16",
        }


@dataclass(frozen=True)
class Head:
    """A drafter and the target it stands beside.

    Attributes:
        target: hidden size and vocabulary are the head's as well.
        intermediate: of the head's MLP.
        draft_vocab: rows of its lm_head. Below the target's vocabulary it has one of its own, else it shares it.
    """

    name: str
    target: Model
    intermediate: int
    draft_vocab: int

    @property
    def reduced(self) -> bool:
        return self.draft_vocab < self.target.vocab

    def config(self, parallel: bool) -> dict[str, Any]:
        """A P-EAGLE head's config.json, or that of an EAGLE-3 head of the same width."""
        of_layers = self.target.config() | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "intermediate_size": self.intermediate,
            "num_hidden_layers": PEAGLE_LAYERS if parallel else EAGLE3_LAYERS,
            "draft_vocab_size": self.draft_vocab,
            "target_hidden_size": self.target.hidden,
        }
        return of_layers | ({"ptd_token_id": self.target.vocab - 1} if parallel else {})

    def weights(self, parallel: bool) -> dict[str, int]:
        """Elements that one draft step reads of each part: {"fc", "layers", "lm_head"}; norms are left out."""
        t = self.target
        attention = (t.heads + 2 * t.kv_heads) * t.head_dim
        first_qkv, qkv = 2 * t.hidden * attention, t.hidden * attention
        one = t.heads * t.head_dim * t.hidden + 3 * t.hidden * self.intermediate
        layers = PEAGLE_LAYERS if parallel else EAGLE3_LAYERS
        return {
            "fc": 3 * t.hidden * t.hidden,
            "layers": first_qkv + (layers - 1) * qkv + layers * one,
            "lm_head": self.draft_vocab * t.hidden,
        }

    def step_bytes(self, parallel: bool, batch: int, k: int, element_bytes: int = 2) -> int:
        """The least that a draft step of a decode batch moves, all drafts refused.

        Weights once a forward (one forward for P-EAGLE, K for EAGLE-3; ``fc`` once), the one valid row of each
        request's captured states, and each draft row's hidden state written once.
        """
        w, rows = self.weights(parallel), batch * k
        passes = 1 if parallel else k
        weights = w["fc"] + passes * (w["layers"] + w["lm_head"])
        return element_bytes * (weights + batch * 3 * self.target.hidden + rows * self.target.hidden)


def write_config(folder: Path, config: dict[str, Any]) -> str:
    """A model folder that vLLM can serve with dummy weights; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return str(folder)


def own_lm_head() -> None:
    """Let dummy heads keep an lm_head of their own, which vLLM grants only to a head loaded from a file."""
    import wrapt

    def mark(module: Any) -> None:
        module.Eagle3LlamaForCausalLM.has_own_lm_head = True

    wrapt.register_post_import_hook(mark, "vllm.model_executor.models.llama_eagle3")


GPT_OSS = Model(shapes.HIDDEN, shapes.HIDDEN, 64, 8, 64, 8, shapes.VOCAB)
# Eight layers: the fewest with room for the default aux layers. The target's own speed plays no part in a draft step.
HEADS = {
    head.name: head
    for head in (
        Head("gpt-oss-20b", GPT_OSS, shapes.head(PEAGLE_LAYERS)["intermediate_size"], shapes.VOCAB),
        Head("qwen3-coder-30b", Model(2048, 2048, 32, 4, 128, 8, 151936), 6144, 151936),
        Head("4096-wide, 32k draft vocabulary", Model(4096, 4096, 32, 8, 128, 8, 128256), 14336, 32000),
    )
}
TINY_HEADS = {
    head.name: head
    for head in (
        Head("tiny", Model(64, 96, 2, 1, 32, 8, 512), 96, 512),
        Head("tiny, reduced vocabulary", Model(64, 96, 2, 1, 32, 8, 512), 96, 256),
    )
}

# For whole engines: the published model, the same without quantized experts, and a dense one of its width and depth.
TARGETS: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": shapes.TARGET,
    "gpt-oss-20b-bf16": {key: value for key, value in shapes.TARGET.items() if key != "quantization_config"},
    "dense": replace(GPT_OSS, intermediate=4 * shapes.HIDDEN, layers=shapes.LAYERS).config(),
}
