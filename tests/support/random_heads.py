"""Random tiny targets and P-EAGLE heads, written in the formats that vLLM loads.

Random weights need no training and no file in the repository, and every variant (family, draft
vocabulary, checkpoint format, norms) costs a few milliseconds. Their drafts are as sharp as a
trained head's, they are just never accepted; ``drafts.recorder`` plants acceptable drafts instead.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from peagle_vllm.heads import selector as files
from peagle_vllm.heads.files import SELECTOR, SELECTOR_FOLDER
from peagle_vllm.heads.head import read_head
from tests.support.dialects import Tensors, Written, as_aws, as_speculators

VOCAB = 512
HIDDEN = 64
# 32 is the smallest head that vLLM's CPU attention takes. FlashAttention 3 runs it through its kernel for 64.
NUM_HEADS, NUM_KV_HEADS = 2, 1
HEAD_DIM = 64 if torch.cuda.is_available() else 32
INTERMEDIATE = 96
EXPERTS, EXPERTS_PER_TOKEN = 4, 2
TARGET_LAYERS = 8
MASK_TOKEN = 509
AUX_LAYERS = (2, 4, 5)  # vLLM's default for eight layers
SIZES = {  # of every tiny model, as its config names them
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SELECTOR_RANK, SELECTOR_CANDIDATES = 8, 6
SELECTOR_POSITIONS = 5
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
# A plain random head hardly looks at its context, and all its mask rows draft the same token. So a head's attention is
# made to pick single rows (ATTENTION) and to outweigh the residual (CONTEXT): a wrong row then changes four in ten.
# Targets stay plain: eight such layers would blow rounding errors up to the size of a margin.
ATTENTION, CONTEXT = 2.0, 6.0
# In bfloat16 such a head would do the same to rounding: three rows in 15,000 moved by 3 ulp, stock vLLM's alike.
GENTLE_ATTENTION, GENTLE_CONTEXT = 0.7, 1.5


@dataclass(frozen=True)
class HeadSpec:
    family: str = "llama"  # "llama" or "qwen3", the head's decoder layers
    fmt: str = "speculators"  # or "aws", or vLLM's own, "vllm" (tests.support.dialects)
    layers: int = 2
    draft_vocab: int = VOCAB  # rows of the head's lm_head; below VOCAB there is a d2t map
    norm_before_residual: bool = False  # which tensor the first layer adds back
    norm_before_fc: bool = False  # one RMSNorm over the concatenated aux hidden states
    fc_norm: bool = False  # one RMSNorm for each aux hidden state (flat config only in vLLM 0.32)
    biases: bool = False  # of attention, and of a Llama head's MLP, too
    own_embeddings: bool = True  # carries embed_tokens of its own instead of the target's
    own_lm_head: bool = True  # carries lm_head of its own; always true with a reduced vocabulary
    spread: float = 0.0  # deviation of the log of lm_head's row norms. In bfloat16 it keeps candidates apart
    gentle: bool = False  # attention that spreads a rounding error less, for bfloat16
    selector: bool = False  # a selector of SELECTOR_RANK beside it, which moves about half of the drafts
    # Of each layer, the tokens that it sees, or None for all; those that slide have one size.
    windows: tuple[int | None, ...] = ()
    aux_layers: tuple[int, ...] = AUX_LAYERS
    seed: int = 1


def _linear(gen: torch.Generator, out_features: int, in_features: int) -> torch.Tensor:
    return torch.randn(out_features, in_features, generator=gen) / math.sqrt(in_features)


def _norm(gen: torch.Generator, width: int = HIDDEN) -> torch.Tensor:
    return 1 + 0.2 * torch.randn(width, generator=gen)


def _lm_head(gen: torch.Generator, rows: int, spread: float) -> torch.Tensor:
    return 2 * _linear(gen, rows, HIDDEN) * (spread * torch.randn(rows, 1, generator=gen)).exp()


def _layer(gen: torch.Generator, prefix: str, family: str, qkv_in: int = HIDDEN) -> Tensors:
    shapes = {
        "self_attn.q_proj": (NUM_HEADS * HEAD_DIM, qkv_in),
        "self_attn.k_proj": (NUM_KV_HEADS * HEAD_DIM, qkv_in),
        "self_attn.v_proj": (NUM_KV_HEADS * HEAD_DIM, qkv_in),
        "self_attn.o_proj": (HIDDEN, NUM_HEADS * HEAD_DIM),
    }
    experts = [f"mlp.experts.{e}" for e in range(EXPERTS)] if family == "qwen3_moe" else ["mlp"]
    for mlp in experts:
        shapes |= {f"{mlp}.{name}_proj": (INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
        shapes[f"{mlp}.down_proj"] = (HIDDEN, INTERMEDIATE)
    if family == "qwen3_moe":
        shapes["mlp.gate"] = (EXPERTS, HIDDEN)
    weights = {f"{prefix}.{name}.weight": _linear(gen, *shape) for name, shape in shapes.items()}
    weights[f"{prefix}.input_layernorm.weight"] = _norm(gen)
    weights[f"{prefix}.post_attention_layernorm.weight"] = _norm(gen)
    if family != "llama":
        weights[f"{prefix}.self_attn.q_norm.weight"] = _norm(gen, HEAD_DIM)
        weights[f"{prefix}.self_attn.k_norm.weight"] = _norm(gen, HEAD_DIM)
    return weights


def _head_layer(gen: torch.Generator, prefix: str, spec: HeadSpec, qkv_in: int) -> Tensors:
    weights = _layer(gen, prefix, spec.family, qkv_in)
    kind = "norm" if spec.family == "qwen3" else "proj"
    attention, context = (GENTLE_ATTENTION, GENTLE_CONTEXT) if spec.gentle else (ATTENTION, CONTEXT)
    for name, factor in ((f"q_{kind}", attention), (f"k_{kind}", attention), ("o_proj", context)):
        weights[f"{prefix}.self_attn.{name}.weight"] *= factor
    if spec.biases:
        kinds = ("_proj",) if spec.family == "llama" else ("q_proj", "k_proj", "v_proj")
        modules = [module for name in weights if (module := name.removesuffix(".weight")).endswith(kinds)]
        weights |= {f"{m}.bias": 0.2 * torch.randn(len(weights[f"{m}.weight"]), generator=gen) for m in modules}
    return weights


def _layer_config(family: str, num_layers: int) -> dict:
    return SIZES | {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "num_hidden_layers": num_layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
    }


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids that any tiny target knows, the same for the same seed."""
    gen = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, MASK_TOKEN, (length,), generator=gen).tolist())


def write_target(folder: Path, family: str = "llama", seed: int = 0) -> Path:
    """Write a random causal LM of ``family`` (llama, qwen3, or qwen3_moe: experts in every layer); its folder."""
    gen = torch.Generator().manual_seed(seed)
    weights = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=gen),
        "model.norm.weight": _norm(gen),
        "lm_head.weight": _lm_head(gen, VOCAB, spread=0.0),
    }
    for i in range(TARGET_LAYERS):
        weights |= _layer(gen, f"model.layers.{i}", family)
    config = _layer_config(family, TARGET_LAYERS) | {"dtype": "float32"}
    if family == "qwen3_moe":
        config |= {"num_experts": EXPERTS, "num_experts_per_tok": EXPERTS_PER_TOKEN, "norm_topk_prob": True}
        config |= {"moe_intermediate_size": INTERMEDIATE, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return Written(config, weights).save(folder)


def write_head(folder: Path, target: Path, spec: HeadSpec) -> Path:
    """Write a random P-EAGLE head for ``target`` and return its folder."""
    gen = torch.Generator().manual_seed(spec.seed)
    head = make_head(spec, gen)
    if spec.fmt == "aws":
        as_aws(head, identity_map=False)
    elif spec.fmt == "speculators":
        as_speculators(head, str(target))
    head.save(folder)
    return write_selector(folder, gen, 0.2 if spec.gentle else 1.0) if spec.selector else folder


def make_head(spec: HeadSpec, gen: torch.Generator) -> Written:
    """A random P-EAGLE head in vLLM's own format."""
    fc_in = len(spec.aux_layers) * HIDDEN
    weights = {
        "fc.weight": _linear(gen, HIDDEN, fc_in),
        "norm.weight": _norm(gen),
        "mask_hidden": torch.randn(1, 1, fc_in, generator=gen),
        "layers.0.hidden_norm.weight": _norm(gen),
    }
    for i in range(spec.layers):
        weights |= _head_layer(gen, f"layers.{i}", spec, HIDDEN if i else 2 * HIDDEN)
    if spec.norm_before_fc:
        weights["input_norm.weight"] = _norm(gen, fc_in)
    if spec.fc_norm:
        weights |= {f"fc_norm.{i}.weight": _norm(gen) for i in range(len(spec.aux_layers))}
    if spec.own_embeddings:
        weights["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN, generator=gen)
    if spec.own_lm_head or spec.draft_vocab < VOCAB:
        weights["lm_head.weight"] = _lm_head(gen, spec.draft_vocab, spec.spread)
    if spec.draft_vocab < VOCAB:
        chosen = torch.randperm(VOCAB, generator=gen)[: spec.draft_vocab].sort().values
        weights["d2t"] = chosen - torch.arange(spec.draft_vocab)
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, chosen, True)
    return Written(_head_config(spec), weights)


def write_pair(folder: Path, spec: HeadSpec = HeadSpec(), family: str = "llama") -> tuple[Path, Path]:
    """A random target and a random head for it: their folders, ``target`` and ``head``."""
    target = write_target(folder / "target", family)
    return target, write_head(folder / "head", target, spec)


def write_selector(
    folder: Path,
    gen: torch.Generator,
    scale: float = 1.0,
    candidates: int = SELECTOR_CANDIDATES,
    rank: int = SELECTOR_RANK,
    change: Callable[[dict, Tensors], object] = lambda selector, weights: None,
) -> Path:
    """Sharpen the head in ``folder`` with a random selector; ``change`` spoils the config's entry or the weights."""
    head = read_head(folder)
    weights = {
        files.PREDECESSORS: torch.randn(head.vocab_size, rank, generator=gen),
        files.SUCCESSORS: torch.randn(head.draft_vocab_size, rank, generator=gen),
        files.PROJECTION: _linear(gen, rank, head.hidden_size),
        files.EDGE_SCALE: scale * (0.5 + torch.rand(SELECTOR_POSITIONS, generator=gen)),
        files.UNARY_SCALE: 0.5 + torch.rand(SELECTOR_POSITIONS, generator=gen),
    }
    selector = {"selector_rank": rank, "selector_top_k": candidates, "head_hash": files.head_hash(head)}
    change(selector, weights)
    config = json.loads((folder / "config.json").read_text()) | {SELECTOR: selector}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / SELECTOR_FOLDER).mkdir(exist_ok=True)
    save_file(weights, folder / SELECTOR_FOLDER / "model.safetensors")
    return folder


def _head_config(spec: HeadSpec) -> dict:
    layer_config = _layer_config(spec.family, spec.layers)
    if any(spec.windows):
        kinds = ["sliding_attention" if window else "full_attention" for window in spec.windows]
        layer_config |= {"layer_types": kinds, "sliding_window": max(filter(None, spec.windows))}
        layer_config |= {"use_sliding_window": True} if spec.family == "qwen3" else {}
    return layer_config | {
        "architectures": ["LlamaForCausalLMEagle3" if spec.family == "llama" else "Eagle3Qwen3ForCausalLM"],
        "attention_bias": spec.biases,
        "mlp_bias": spec.biases and spec.family == "llama",
        "draft_vocab_size": spec.draft_vocab,
        "target_hidden_size": HIDDEN,
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.norm_before_fc,
        "fc_norm": spec.fc_norm,
        "eagle_aux_hidden_state_layer_ids": list(spec.aux_layers),
        "num_aux_hidden_states": len(spec.aux_layers),
        "mask_token_id": MASK_TOKEN,
        "dtype": "float32",
    }
