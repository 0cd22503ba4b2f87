"""What is wrong with a head's config alone: its class, its mask token, and each field that vLLM's layers read.

vLLM and transformers would stop at these too, some with a page of text and some only while weights are loaded.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from peagle_vllm.heads.config import LLAMA_ARCHITECTURES, QWEN3_ARCHITECTURES, is_size, is_whole, unfit
from peagle_vllm.heads.files import shown
from peagle_vllm.heads.head import Head

Kind = tuple[Callable[[Any], bool], str]  # (fits, what it needs to be)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _one_of(*words: str) -> Kind:
    return (lambda v: isinstance(v, str) and v in words, f"one of {', '.join(words)}")


SIZE: Kind = (is_size, "a whole number above 0")
POSITIVE: Kind = (lambda v: _number(v) and 0 < v < 1e30, "a number above 0")
NUMBER: Kind = (_number, "a number")
SHARE: Kind = (lambda v: _number(v) and 0 <= v <= 1, "a number from 0 to 1")
FLAG: Kind = (lambda v: isinstance(v, bool), "true or false")
OBJECT: Kind = (lambda v: isinstance(v, dict), "a JSON object")
TOKENS: Kind = (
    lambda v: is_whole(v) or (isinstance(v, list) and all(map(is_whole, v))),
    "a token id or a list of token ids",
)
DTYPE = _one_of(
    *("float32", "float16", "bfloat16", "float", "half", "torch.float32", "torch.float16", "torch.bfloat16", "auto")
)
# Trainers copy the target's; transformers must know it. Its defaults are read, the layers are vLLM's Llama or Qwen3.
MODEL_TYPE = _one_of(
    *("llama", "qwen3", "gemma2", "gpt_oss", "llama4_text", "minimax_m2", "mistral", "olmo2", "phi3"),
    *("qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen3_moe", "qwen3_vl_text"),
)
LAYER_TYPES = ("full_attention", "sliding_attention")
ROPE_TYPES = ("default", "linear", "dynamic", "ntk", "yarn", "llama3", "longrope", "su", "proportional", "mrope")
OF_KIND: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    (SIZE, ("head_dim", "intermediate_size", "num_attention_heads", "num_key_value_heads")),
    (SIZE, ("max_position_embeddings", "pretraining_tp", "sliding_window")),
    (POSITIVE, ("logit_scale", "partial_rotary_factor", "rms_norm_eps", "rope_theta")),
    (NUMBER, ("attention_dropout",)),
    (SHARE, ("initializer_range",)),
    (FLAG, ("attention_bias", "fc_norm", "mlp_bias", "norm_before_fc", "norm_before_residual", "norm_output")),
    (FLAG, ("tie_word_embeddings", "use_cache", "use_sliding_window")),
    (OBJECT, ("compression_config", "eagle_config", "quantization_config", "rope_parameters", "rope_scaling")),
    (TOKENS, ("bos_token_id", "eos_token_id", "pad_token_id")),
    (DTYPE, ("dtype", "torch_dtype")),
    (MODEL_TYPE, ("model_type",)),
    (_one_of("silu"), ("hidden_act",)),
)
KINDS = {name: kind for kind, names in OF_KIND for name in names}
REQUIRED = ("model_type", "intermediate_size", "num_attention_heads")
REQUIRED_NESTED = ("intermediate_size", "num_attention_heads", "hidden_act", "rms_norm_eps")
NEVER_NULL = (
    *("attention_bias", "hidden_act", "intermediate_size", "max_position_embeddings", "mlp_bias", "model_type"),
    *("num_attention_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "use_cache"),
)
OF_LLAMA3_ROPE = ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings")
ROPE_NUMBERS = (*OF_LLAMA3_ROPE, "attention_factor", "beta_fast", "beta_slow", "partial_rotary_factor", "rope_theta")


def check_architecture(head: Head) -> Iterator[str]:
    if head.family is None and head.is_speculators:
        kind, nested = head.config.get("speculators_model_type"), head.served.get("model_type", "llama")
        yield (
            f"speculators_model_type {shown(kind)} with model_type {shown(nested)} is no P-EAGLE class of vLLM, "
            f'needs "peagle" with "llama" or "qwen3": {head.config_file}; name a P-EAGLE head'
        )
    elif head.family is None:
        yield (
            f"architecture {shown(head.architecture)} is no P-EAGLE class of vLLM: {head.config_file}; set "
            f'"architectures" to one of {", ".join(sorted(LLAMA_ARCHITECTURES | QWEN3_ARCHITECTURES))}'
        )
    eagle = head.served.get("eagle_config") or {}
    if not eagle.get("use_aux_hidden_state", True):
        yield f"eagle_config.use_aux_hidden_state is off, P-EAGLE needs it: {head.config_file}; set it to true"


def check_mask_token(head: Head) -> Iterator[str]:
    token, key, file = head.mask_token_id, head.mask_token_key, head.config_file
    if token is None:
        beside = ' beside "speculators_model_type": "peagle"' if head.is_speculators else ""
        what = f"no mask token id ({key} is null)" if key else "no mask token id"
        yield (
            f'{what}: {file}; add "mask_token_id" with the id that the head was trained with{beside}, or give it to '
            "peagle-vllm convert --mask-token-id"
        )
    elif not is_whole(token):
        yield f"{key} is {shown(token)}, needs a whole number: {file}; set it to the id the head was trained with"
    elif not 0 <= token < head.vocab_size:
        yield (
            f"{key} is {shown(token)}, outside the vocabulary of {head.vocab_size} tokens: {file}; set it to the id "
            "the head was trained with"
        )


def check_fields(head: Head) -> Iterator[str]:
    """One line for each field that vLLM's layers cannot take, and for each that they lack."""
    served, place, nested = head.served, head.layer_place, head.is_speculators
    # A speculators config gets no defaults from transformers; ``check_architecture`` names its model_type.
    for key in REQUIRED_NESTED if nested else REQUIRED:
        if key not in served:
            yield f"{key} is missing: {place}; add it"
    lines = []
    for key, (fits, needs) in KINDS.items():
        checked = key in served and (served[key] is not None or key in NEVER_NULL)
        if checked and not fits(served[key]) and not (nested and key == "model_type"):
            lines.append(unfit(key, served[key], needs, place))
    yield from lines
    if lines:
        return
    yield from _attention(served, place)
    yield from _layer_types(head, place)
    for key in ("rope_parameters", "rope_scaling"):
        yield from _rope(served.get(key) or {}, key, place)
    if nested and "rope_theta" not in served and (served.get("rope_parameters") or {}).get("rope_theta") is None:
        key = "rope_parameters.rope_theta" if "rope_parameters" in served else "rope_theta"
        yield f"{key} is missing: {place}; add it"


def _attention(served: Mapping[str, Any], place: str) -> Iterator[str]:
    heads, hidden = served.get("num_attention_heads"), served["hidden_size"]
    if heads is None:
        return
    groups = served.get("num_key_value_heads") or heads
    if heads % groups:
        yield f"num_attention_heads is {heads}, not a multiple of num_key_value_heads {groups}: {place}; correct them"
    if hidden % heads and (not served.get("head_dim") or served.get("model_type") == "llama"):
        yield f"hidden_size is {hidden}, not a multiple of num_attention_heads {heads}: {place}; correct it"


def _layer_types(head: Head, place: str) -> Iterator[str]:
    types = head.served.get("layer_types")
    if types is None:
        return
    if not isinstance(types, list) or not all(isinstance(t, str) and t in LAYER_TYPES for t in types):
        yield unfit("layer_types", types, f"a list of {' and '.join(LAYER_TYPES)}", place)
    elif len(types) < head.num_layers:
        yield f"layer_types names {len(types)} layers, num_hidden_layers is {head.num_layers}: {place}; correct it"
    elif "sliding_attention" in types and not head.served.get("sliding_window"):
        yield f'layer_types names sliding layers, and no "sliding_window": {place}; add it'


def _rope(rope: Mapping[str, Any], key: str, place: str) -> Iterator[str]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        yield f"{key} has the type {shown(kind)}, needs one of {', '.join(ROPE_TYPES)}: {place}; correct it"
        return
    fits, needs = POSITIVE
    for name in ROPE_NUMBERS:
        value, needed = rope.get(name), kind == "llama3" and name in OF_LLAMA3_ROPE
        if needed if value is None else not fits(value):
            yield unfit(f"{key}.{name}", value, needs, place)
