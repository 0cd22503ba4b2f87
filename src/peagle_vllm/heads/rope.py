"""The rotary embedding of a head's layers: however its config states it, as the one object that vLLM's layers read."""

import math
from typing import Any

from peagle_vllm.heads.config import FLAG, POSITIVE, SIZE, Config, Kind, unfit
from peagle_vllm.heads.files import HeadError, shown

THETA = "rope_theta"
PARTIAL = "partial_rotary_factor"
TRAINED_LENGTH = "original_max_position_embeddings"
NUMBER = Kind(lambda v: type(v) in (int, float) and -1e30 < v < 1e30, "a number")
SCALE = Kind(lambda v: NUMBER.fits(v) and v >= 0, "a number from 0")
FACTORS = Kind(lambda v: isinstance(v, list) and bool(v) and all(map(POSITIVE.fits, v)), "a list of numbers above 0")
# What vLLM reads of ``rope_parameters``, whatever else stands there.
KINDS: dict[str, Kind] = {
    **dict.fromkeys(("alpha", "beta_fast", "beta_slow", "high_freq_factor", "low_freq_factor"), POSITIVE),
    **dict.fromkeys(("max_trained_positions", "rope_dim"), SIZE),
    **dict.fromkeys(("attention_factor", "long_mscale", "short_mscale"), NUMBER),
    **dict.fromkeys(("mscale", "mscale_all_dim"), SCALE),
    # Below 1 vLLM's table of positions would be shorter than its sequences.
    "factor": Kind(lambda v: NUMBER.fits(v) and 1 <= v <= 10_000, "a number from 1 to 10,000"),
    "mixed_b": Kind(lambda v: SCALE.fits(v) and v <= 10, "a number from 0 to 10"),
    THETA: Kind(lambda v: POSITIVE.fits(v) and v > 1, "a number above 1"),
    TRAINED_LENGTH: Kind(lambda v: SIZE.fits(v) and v > 1, "a whole number above 1"),
    **dict.fromkeys(("long_factor", "short_factor"), FACTORS),
    PARTIAL: Kind(lambda v: POSITIVE.fits(v) and v <= 1, "a number above 0, at most 1"),
    "truncate": FLAG,
    "use_fope": Kind(lambda v: v is False, "false"),
}
# The types that vLLM computes for a text on every platform, and what each needs.
TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "dynamic": ("factor",),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", TRAINED_LENGTH),
    "longrope": ("short_factor", "long_factor", TRAINED_LENGTH),
    "ntk": ("factor",),
    "proportional": (),
    "yarn": ("factor", TRAINED_LENGTH),
}
# A text's positions are the same in every section of M-RoPE, so that plain RoPE is the same for it.
OTHER_NAMES = {"mrope": "default", "su": "longrope"}
# Where transformers and vLLM look for a field that is not in the object itself.
ELSEWHERE = {THETA: (THETA, "rotary_emb_base"), PARTIAL: (PARTIAL, "rotary_pct", "rotary_emb_fraction")}


def rope_parameters(
    layers: Config, place: str, default_theta: float | None, first: str = "rope_scaling"
) -> dict[str, Any]:
    """vLLM's ``rope_parameters`` for the layers of a head. HeadError where a field is missing or of no use to vLLM.

    Args:
        layers: their config; ``place``, where it stands, is for messages.
        default_theta: taken where the config states none; None: it has to.
        first: the object that counts where there are two: "rope_parameters" in speculators' format.
    """
    second = "rope_parameters" if first == "rope_scaling" else "rope_scaling"
    key = first if layers.get(first) else second
    rope = _of_all_layers(layers, key, place)
    kind = rope.get("rope_type", rope.get("type", "default"))
    name = OTHER_NAMES.get(kind, kind) if isinstance(kind, str) else None
    if name not in TYPES:
        raise HeadError(unfit(f"{key}.rope_type", kind, f"one of {', '.join(TYPES)}", place))
    if OTHER_NAMES.get(str(rope.get("type")), rope.get("type", name)) != name:
        raise HeadError(unfit(f"{key}.type", rope["type"], f"the value of rope_type, {shown(kind)}", place))
    names = {field: f"{key}.{field}" for field in KINDS}  # for messages
    fields = {field: value for field, value in rope.items() if field in KINDS}
    for field, others in ELSEWHERE.items():
        for other in others:
            if field not in fields and layers.get(other) is not None:
                fields[field], names[field] = layers[other], other
    if THETA not in fields and (theta := _of_all_layers(layers, second, place).get(THETA)) is not None:
        fields[THETA] = theta
    if TRAINED_LENGTH in TYPES[name]:  # transformers' order; a head is trained on its config's length
        lengths = layers.get(TRAINED_LENGTH), fields.get(TRAINED_LENGTH), layers.get("max_position_embeddings")
        if (length := next((length for length in lengths if length is not None), None)) is not None:
            fields[TRAINED_LENGTH] = length
    if default_theta is not None:
        fields.setdefault(THETA, default_theta)
    for field in (THETA, *TYPES[name]):
        if field not in fields:
            raise HeadError(f"{names[field]} is missing: {place}; add it")
    for field, value in fields.items():
        if not KINDS[field].fits(value):
            raise HeadError(unfit(names[field], value, KINDS[field].needs, place))
    if "factor" in fields:
        fields["factor"] = float(fields["factor"])  # vLLM takes a whole number for a list of factors
    if name == "longrope":  # else vLLM takes the longest served length for the one that sets the attention's scale
        original, longest = fields[TRAINED_LENGTH], layers.get("max_position_embeddings")
        scale = fields.get("factor") or max(1.0, (longest if SIZE.fits(longest) else 1) / original)
        factor = fields.get("attention_factor") or math.sqrt(1 + math.log(scale) / math.log(original))
        fields = {"short_mscale": factor, "long_mscale": factor, **fields}
    return {"rope_type": name, **fields}


def rotary_fault(rope: Config, head_dim: int, place: str) -> str | None:
    """The line for ``rope_parameters`` that do not fit the width of the attention heads."""
    width = rope.get("rope_dim") or int(head_dim * rope.get(PARTIAL, 1.0))
    least = 4 if rope["rope_type"] == "dynamic" else 2
    if width % 2 or not least <= width <= head_dim:
        what = f"the rotary embedding is {width} wide, needs an even width from {least} to head_dim {head_dim}"
        return f"{what}: {place}; correct it"
    for field in ("short_factor", "long_factor"):
        if len(rope.get(field, range(width // 2))) != width // 2:
            return f"{field} has {len(rope[field])} numbers, needs {width // 2}: {place}; correct it"
    return None


def _of_all_layers(layers: Config, key: str, place: str) -> dict[str, Any]:
    """The object itself, without what is null; of objects by layer type, that of the layers' only type."""
    rope = layers.get(key)
    rope = {} if rope is None else rope
    if not isinstance(rope, dict):
        raise HeadError(unfit(key, rope, "a JSON object", place))
    by_type = {name: value for name, value in rope.items() if name.endswith("_attention") and value is not None}
    named = layers.get("layer_types") or ["full_attention"]
    types = set(map(str, named)) if isinstance(named, list) else set()
    if by_type and len(types) == 1 and isinstance(only := by_type.get(types.pop()), dict):
        rope = {**rope, **only}
    elif by_type:
        what = f"{key} holds one for each of {', '.join(map(shown, by_type))}, and vLLM's head takes one"
        raise HeadError(f"{what}: {place}; write the one that it was trained with")
    return {name: value for name, value in rope.items() if value is not None}
