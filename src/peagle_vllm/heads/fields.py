"""The config that vLLM is given for a head: what its head classes read, each field stated, and nothing else.

vLLM and transformers read a hundred fields of a config.json, most of them of other models, and check the types of more.
One that says nothing of a head could stop the server, or change what is served. So a head's config is read here.
"""

from collections.abc import Iterator
from typing import Any

from peagle_vllm.heads.config import AUX_KEY, FLAG, POSITIVE, SIZE, Kind, is_whole, unfit
from peagle_vllm.heads.files import SELECTOR, HeadError
from peagle_vllm.heads.head import Head
from peagle_vllm.heads.rope import rope_parameters, rotary_fault

# vLLM's quantization methods that a head's linear layers can have. vLLM itself names a key that it misses.
QUANTIZATION = (
    *("auto_awq", "awq", "awq_marlin", "auto_gptq", "gptq", "gptq_marlin", "compressed-tensors", "compressed_tensors"),
    *("fp8", "modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8"),
)


def _quant_method(config: Any) -> str | None:
    """Its name, in lower case; ModelOpt's own files name only their producer."""
    if not isinstance(config, dict):
        return None
    producer = config.get("producer")
    is_modelopt = isinstance(producer, dict) and producer.get("name") == "modelopt"
    return str(config.get("quant_method", "modelopt" if is_modelopt else "")).lower()


QUANTIZED = Kind(
    lambda v: _quant_method(v) in QUANTIZATION,
    f"a JSON object whose quant_method is one of {', '.join(QUANTIZATION)}",
)
COUNT = Kind(lambda v: is_whole(v) and 0 <= v < 2**31, "a whole number from 0")  # a window of 0 is none
LAYER_TYPES = ("full_attention", "sliding_attention")
# What reaches vLLM's head classes as it stands, and what it is where the config has none, or null.
FIELDS: dict[str, tuple[Kind, Any]] = {
    **dict.fromkeys(("attention_bias", "mlp_bias"), (FLAG, False)),
    **dict.fromkeys(("compression_config", "quantization_config"), (QUANTIZED, None)),
    **dict.fromkeys(("intermediate_size", "max_position_embeddings", "num_attention_heads"), (SIZE, None)),
    "hidden_act": (Kind(lambda v: v in ("silu", "swish"), '"silu", which alone vLLM\'s head classes compute'), "silu"),
    "is_causal": (Kind(lambda v: v is True, "true, because a draft sees no later token"), True),
    "logit_scale": (POSITIVE, 1.0),
    "rms_norm_eps": (POSITIVE, 1e-6),
}
# What reaches them in another form.
OTHERS: dict[str, Kind] = {
    **dict.fromkeys(("fc_norm", "norm_before_fc", "norm_before_residual", "use_sliding_window"), FLAG),
    **dict.fromkeys(("head_dim", "num_key_value_heads"), SIZE),
    **dict.fromkeys(("max_window_layers", "sliding_window"), COUNT),
}
REQUIRED = ("intermediate_size", "num_attention_heads")
DEFAULT_THETA = ("llama", "ministral", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe")  # whose theta is 10,000
TRAINED_DEPTH = "num_depths"  # NeMo's field; any head whose depth is known is given it


def vllm_fields(head: Head) -> dict[str, Any]:
    """The flat config of a head without faults."""
    served = head.served
    layer_types, window = windows(head)
    fields = {key: default if served.get(key) is None else served[key] for key, (_, default) in FIELDS.items()}
    return fields | {
        "architectures": [head.architecture],
        "hidden_act": "silu",  # swish is another name of it
        "hidden_size": head.hidden_size,
        "vocab_size": head.vocab_size,
        "num_hidden_layers": head.num_layers,
        "num_key_value_heads": served.get("num_key_value_heads") or served["num_attention_heads"],
        "head_dim": head.head_dim,
        "rope_parameters": rope_of_head(head),
        "layer_types": layer_types,
        "sliding_window": window,
        "target_hidden_size": head.target_hidden_size,
        "draft_vocab_size": head.draft_vocab_size,
        "num_aux_hidden_states": head.num_aux,
        AUX_KEY: head.aux_layer_ids and list(head.aux_layer_ids),
        "mask_token_id": head.mask_token_id,
        TRAINED_DEPTH: head.trained_depth,
        SELECTOR: head.config.get(SELECTOR),
        **head.norms,
    }


def windows(head: Head) -> tuple[list[str] | None, int | None]:
    """``layer_types`` and ``sliding_window`` of a head without faults; None where every layer sees all tokens.

    transformers ignores the window of a flat Qwen3 config without ``use_sliding_window``.
    """
    served, layers = head.served, range(head.num_layers)
    types, window = served.get("layer_types"), served.get("sliding_window")
    if served.get("model_type") == "qwen3" and not head.is_speculators:
        window = window if served.get("use_sliding_window") else None
        first = 28 if served.get("max_window_layers") is None else served["max_window_layers"]
        types = types or [LAYER_TYPES[i >= first] for i in layers]
    types = types and types[: len(layers)]
    return (types, window) if window and types and LAYER_TYPES[1] in types else (None, None)


def field_faults(head: Head) -> Iterator[str]:
    """One line for each field that is missing, or has a value that vLLM cannot use."""
    served, place = head.served, head.layer_place
    lines = [f"{key} is missing: {place}; add it" for key in REQUIRED if served.get(key) is None]
    for key, kind in ({key: kind for key, (kind, _) in FIELDS.items()} | OTHERS).items():
        if served.get(key) is not None and not kind.fits(served[key]):
            is_outside = head.is_speculators and key in head.config
            lines.append(unfit(key, served[key], kind.needs, head.config_file if is_outside else place))
    eagle = served.get("eagle_config") or {}
    for key in ("norm_before_fc", "use_aux_hidden_state"):
        if eagle.get(key) is not None and not FLAG.fits(eagle[key]):
            lines.append(unfit(f"eagle_config.{key}", eagle[key], FLAG.needs, head.config_file))
    try:
        rope = rope_of_head(head)
    except HeadError as error:
        lines.append(str(error))
    lines = lines or [*_attention_faults(head), *_layer_type_faults(head)]
    if not lines and (fault := rotary_fault(rope, head.head_dim, place)):
        lines = [fault]
    yield from lines


def rope_of_head(head: Head) -> dict[str, Any]:
    """Of a flat config without theta, transformers takes that of its model type."""
    if head.is_speculators:
        return rope_parameters(head.served, head.layer_place, None, "rope_parameters")
    known = (head.served.get("model_type") or "llama") in DEFAULT_THETA
    return rope_parameters(head.served, head.layer_place, 10000.0 if known else None)


def _attention_faults(head: Head) -> Iterator[str]:
    served, place = head.served, head.layer_place
    heads, hidden = served["num_attention_heads"], head.hidden_size
    groups = served.get("num_key_value_heads") or heads
    if heads % groups:
        yield f"num_attention_heads is {heads}, not a multiple of num_key_value_heads {groups}: {place}; correct them"
    if hidden % heads and not served.get("head_dim"):
        yield f"hidden_size is {hidden}, not a multiple of num_attention_heads {heads}: {place}; correct it"


def _layer_type_faults(head: Head) -> Iterator[str]:
    types, place = head.served.get("layer_types"), head.layer_place
    if types is None:
        return
    if not isinstance(types, list) or not all(isinstance(t, str) and t in LAYER_TYPES for t in types):
        yield unfit("layer_types", types, f"a list of {' and '.join(LAYER_TYPES)}", place)
    elif len(types) < head.num_layers:
        yield f"layer_types names {len(types)} layers, num_hidden_layers is {head.num_layers}: {place}; correct it"
    elif LAYER_TYPES[1] in types and not head.served.get("sliding_window"):
        yield f'layer_types names sliding layers, and no "sliding_window": {place}; add it'
