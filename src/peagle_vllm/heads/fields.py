"""The fields of a head's config that vLLM's layers read: each has a kind, and one line says which one has another.

vLLM and transformers would die of them too, some with a page of text and some only while weights are loaded.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from peagle_vllm.heads.config import is_speculators, is_whole
from peagle_vllm.heads.files import shown
from peagle_vllm.heads.head import Head

Kind = tuple[Callable[[Any], bool], str]


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


SIZE: Kind = (lambda v: is_whole(v) and 0 < v < 2**31, "a whole number above 0")
POSITIVE: Kind = (lambda v: _number(v) and 0 < v < 1e30, "a number above 0")
NUMBER: Kind = (_number, "a number")
FLAG: Kind = (lambda v: isinstance(v, bool), "true or false")
OBJECT: Kind = (lambda v: isinstance(v, dict), "a JSON object")
TOKENS: Kind = (
    lambda v: is_whole(v) or (isinstance(v, list) and all(map(is_whole, v))),
    "a token id or a list of token ids",
)
DTYPES = ("float32", "float16", "bfloat16", "float", "half", "torch.float32", "torch.float16", "torch.bfloat16", "auto")
# Trainers copy the target's; transformers must know it. Its defaults are read, the layers are vLLM's Llama or Qwen3.
MODEL_TYPES = (
    *("llama", "qwen3", "gemma2", "gpt_oss", "llama4_text", "minimax_m2", "mistral", "olmo2", "phi3"),
    *("qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen3_moe", "qwen3_vl_text"),
)
LAYER_TYPES = ("full_attention", "sliding_attention")
ROPE_TYPES = ("default", "linear", "dynamic", "ntk", "yarn", "llama3", "longrope", "su", "proportional", "mrope")


def one_of(*words: str) -> Kind:
    return (lambda v: isinstance(v, str) and v in words, f"one of {', '.join(words)}")


KINDS: dict[str, Kind] = {
    "attention_bias": FLAG,
    "attention_dropout": NUMBER,
    "bos_token_id": TOKENS,
    "compression_config": OBJECT,
    "dtype": one_of(*DTYPES),
    "eagle_config": OBJECT,
    "eos_token_id": TOKENS,
    "fc_norm": FLAG,
    "head_dim": SIZE,
    "hidden_act": one_of("silu"),
    "initializer_range": (lambda v: _number(v) and 0 <= v <= 1, "a number from 0 to 1"),
    "intermediate_size": SIZE,
    "logit_scale": POSITIVE,
    "max_position_embeddings": SIZE,
    "mlp_bias": FLAG,
    "model_type": one_of(*MODEL_TYPES),
    "norm_before_fc": FLAG,
    "norm_before_residual": FLAG,
    "norm_output": FLAG,
    "num_attention_heads": SIZE,
    "num_key_value_heads": SIZE,
    "pad_token_id": TOKENS,
    "partial_rotary_factor": POSITIVE,
    "pretraining_tp": SIZE,
    "quantization_config": OBJECT,
    "rms_norm_eps": POSITIVE,
    "rope_parameters": OBJECT,
    "rope_scaling": OBJECT,
    "rope_theta": POSITIVE,
    "sliding_window": SIZE,
    "tie_word_embeddings": FLAG,
    "torch_dtype": one_of(*DTYPES),
    "use_cache": FLAG,
    "use_sliding_window": FLAG,
}
REQUIRED = ("model_type", "intermediate_size", "num_attention_heads")
REQUIRED_NESTED = ("hidden_act", "rms_norm_eps")  # a speculators config gets no defaults from transformers
NEVER_NULL = {
    "attention_bias",
    "intermediate_size",
    "hidden_act",
    "max_position_embeddings",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
    "use_cache",
}
ROPE_NUMBERS = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    "low_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
)
LLAMA3 = ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings")


def check_fields(head: Head) -> Iterator[str]:
    """One line for each field of another kind than vLLM's layers need, and for each that they lack."""
    served, place = head.served, layer_place(head)
    nested = is_speculators(head.config)
    judged_here = {key: kind for key, kind in KINDS.items() if not (nested and key == "model_type")}  # else in checks
    for key in REQUIRED + (REQUIRED_NESTED if nested else ()):
        if key in judged_here and key not in served:
            yield f"{key} is missing: {place}; add it"
    faults = 0
    for key, (fits, needs) in judged_here.items():
        value = served.get(key)
        if (value is None and key not in NEVER_NULL) or key not in served or fits(value):
            continue
        faults += 1
        yield f"{key} is {shown(value)}, needs {needs}: {place}; correct it"
    if not faults:
        yield from _attention(served, place)
        yield from _layer_types(head, place)
        for key in ("rope_parameters", "rope_scaling"):
            yield from _rope(served.get(key) or {}, key, place)
        parameters = served.get("rope_parameters") or {}
        if nested and "rope_theta" not in served and parameters.get("rope_theta") is None:
            key = "rope_parameters.rope_theta" if "rope_parameters" in served else "rope_theta"
            yield f"{key} is missing: {place}; add it"


def layer_place(head: Head) -> str:
    """Where the fields of the decoder layers stand, for messages."""
    return f"transformer_layer_config of {head.config_file}" if is_speculators(head.config) else head.config_file


def _attention(served: Mapping[str, Any], place: str) -> Iterator[str]:
    heads = served.get("num_attention_heads")
    if heads is None:
        return
    groups = served.get("num_key_value_heads") or heads
    if heads % groups:
        yield f"num_attention_heads is {heads}, no multiple of num_key_value_heads {groups}: {place}; correct them"
    if served["hidden_size"] % heads and (not served.get("head_dim") or served.get("model_type") == "llama"):
        yield f"hidden_size is {served['hidden_size']}, no multiple of num_attention_heads {heads}: {place}; correct it"


def _layer_types(head: Head, place: str) -> Iterator[str]:
    types = head.served.get("layer_types")
    if types is None:
        return
    if not isinstance(types, list) or not all(isinstance(t, str) and t in LAYER_TYPES for t in types):
        yield f"layer_types is {shown(types)}, needs a list of {' and '.join(LAYER_TYPES)}: {place}; correct it"
    elif len(types) < head.num_layers:
        yield f"layer_types names {len(types)} layers, num_hidden_layers is {head.num_layers}: {place}; correct it"
    elif "sliding_attention" in types and not head.served.get("sliding_window"):
        yield f'layer_types names sliding layers, and no "sliding_window": {place}; add it'


def _rope(rope: Mapping[str, Any], key: str, place: str) -> Iterator[str]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        yield f"{key} has the type {shown(kind)}, needs one of {', '.join(ROPE_TYPES)}: {place}; correct it"
        return
    for name in ROPE_NUMBERS:
        value = rope.get(name)
        if (value is not None and not POSITIVE[0](value)) or (value is None and kind == "llama3" and name in LLAMA3):
            yield f"{key}.{name} is {shown(value)}, needs a number above 0: {place}; correct it"
