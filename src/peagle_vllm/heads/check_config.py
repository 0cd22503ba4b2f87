"""What is wrong with a head's config alone: its class, its mask token, and fields that would be served wrongly in
silence, or that other checks compute with. Any other field transformers and vLLM refuse by its name.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from peagle_vllm.heads.config import LLAMA_ARCHITECTURES, QWEN3_ARCHITECTURES, is_size, is_whole, unfit
from peagle_vllm.heads.files import shown
from peagle_vllm.heads.head import Head

Kind = tuple[Callable[[Any], bool], str]  # (fits, what it needs to be)
SIZE: Kind = (is_size, "a whole number above 0")
POSITIVE: Kind = (lambda v: type(v) in (int, float) and 0 < v < 1e30, "a number above 0")  # NaN is none
FLAG: Kind = (lambda v: isinstance(v, bool), "true or false")  # vLLM takes "false" for true
KINDS = {
    **dict.fromkeys(("head_dim", "intermediate_size", "num_attention_heads", "num_key_value_heads"), SIZE),
    **dict.fromkeys(("rms_norm_eps", "rope_theta"), POSITIVE),
    **dict.fromkeys(("attention_bias", "fc_norm", "mlp_bias", "norm_before_fc", "norm_before_residual"), FLAG),
    **dict.fromkeys(("max_position_embeddings", "sliding_window"), SIZE),
    "hidden_act": (lambda v: v == "silu", '"silu", which alone vLLM\'s head classes compute'),
}
REQUIRED = ("intermediate_size", "num_attention_heads")
LAYER_TYPES = ("full_attention", "sliding_attention")


def check_architecture(head: Head) -> Iterator[str]:
    if head.family is None and head.is_speculators:
        kind, nested = head.config.get("speculators_model_type"), head.served.get("model_type", "llama")
        what = f"speculators_model_type {shown(kind)} with model_type {shown(nested)} is no P-EAGLE class of vLLM"
        yield f'{what}, needs "peagle" with "llama" or "qwen3": {head.config_file}; name a P-EAGLE head'
    elif head.family is None:
        what = f"architecture {shown(head.architecture)} is no P-EAGLE class of vLLM: {head.config_file}"
        yield f'{what}; set "architectures" to one of {", ".join(sorted(LLAMA_ARCHITECTURES | QWEN3_ARCHITECTURES))}'
    eagle = head.served.get("eagle_config") or {}
    if not eagle.get("use_aux_hidden_state", True):
        yield f"eagle_config.use_aux_hidden_state is off, P-EAGLE needs it: {head.config_file}; set it to true"


def check_mask_token(head: Head) -> Iterator[str]:
    token, key, file = head.mask_token_id, head.mask_token_key, head.config_file
    mend = "set it to the id the head was trained with"
    if token is None:
        beside = ' beside "speculators_model_type": "peagle"' if head.is_speculators else ""
        what = f"no mask token id ({key} is null)" if key else "no mask token id"
        add = f'add "mask_token_id" with the id that the head was trained with{beside}'
        yield f"{what}: {file}; {add}, or give it to peagle-vllm convert --mask-token-id"
    elif not is_whole(token):
        yield f"{key} is {shown(token)}, needs a whole number: {file}; {mend}"
    elif not 0 <= token < head.vocab_size:
        yield f"{key} is {shown(token)}, outside the vocabulary of {head.vocab_size} tokens: {file}; {mend}"


def check_fields(head: Head) -> Iterator[str]:
    """One line for each field that is missing or unfit."""
    served, place = head.served, head.layer_place
    lines = [f"{key} is missing: {place}; add it" for key in REQUIRED if served.get(key) is None]
    for key, (fits, needs) in KINDS.items():
        is_stated = key in served and (served[key] is not None or needs == POSITIVE[1])  # null is a default of others
        if is_stated and not fits(served[key]):
            lines.append(unfit(key, served[key], needs, place))
    lines += _rope(head, place)
    yield from lines or [*_attention(served, place), *_layer_types(head, place)]


def _rope(head: Head, place: str) -> Iterator[str]:
    rope = head.served.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        yield unfit("rope_parameters", rope, "a JSON object", place)
    elif by_type := {name: value for name, value in rope.items() if isinstance(value, dict)}:
        what = f"rope_parameters holds one for each of {', '.join(map(shown, by_type))}, and vLLM's head takes one"
        mend = f"write the one that it was trained with, such as {shown(next(iter(by_type.values())))}"
        yield f"{what}: {place}; {mend}"
    elif head.is_speculators and "rope_theta" not in head.served and rope.get("rope_theta") is None:
        yield f"rope_parameters.rope_theta is missing: {place}; add it"  # transformers would take 10,000 in silence


def _attention(served: Mapping[str, Any], place: str) -> Iterator[str]:
    heads, hidden = served["num_attention_heads"], served["hidden_size"]
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
