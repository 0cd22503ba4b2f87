"""A head's config.json as vLLM reads it, and the fields that vLLM needs but does not find there.

vLLM 0.32 and 0.33 read a head's config in one of two ways. Both are repeated here, because vLLM ignores a field in the
wrong place, and then drafts badly with a default.

    speculators format   transformer_layer_config, plus a few named fields   (configs/speculators/algos.py)
    any other            the config itself, its architecture under the prefix Eagle3   (configs/eagle.py)

docs/heads.md says how each dialect is recognised, and what serving maps for vLLM. A new one goes into ``flat_config``
and ``vllm_name``; then into tests/support/dialects.py, tests/heads/writers.py, tests/drafts/test_dialects.py, and the
table in docs/heads.md.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeGuard

from peagle_vllm.heads.files import FLOATS, HeadError, TensorInfo, shown

Config = Mapping[str, Any]
Family = Literal["llama", "qwen3"]

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
# Of NeMo and SpecForge, for the layers of either family.
UNREGISTERED = {"LlamaEagle3DraftModel", "LlamaPEagleDraftModel", "PEagleDraftModel"}
OF_FAMILY = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
# The architectures of vLLM's registry whose classes know mask_hidden, and the layers of each class.
FAMILIES: dict[str, Family] = {
    "Eagle3LlamaForCausalLM": "llama",
    "Eagle3MiniMaxM2ForCausalLM": "llama",
    "Eagle3Qwen2_5vlForCausalLM": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
    "Eagle3Qwen3vlForCausalLM": "llama",
    "LlamaForCausalLMEagle3": "llama",
    "PeagleLlamaForCausalLM": "llama",
    "PeagleQwen3ForCausalLM": "qwen3",
}
QUANTIZED = ("quantization_config", "compression_config")
TENSORS = "head_tensors"  # put on a served head's config: the names of its ``weights``
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # in the order in which vLLM looks for a mask token


def vllm_name(name: str) -> str:
    """A tensor's name as vLLM's P-EAGLE classes take it.

    NeMo puts ``model.`` before every name but lm_head's, AWS and SpecForge call the first layer ``midlayer``, and
    ``mask_hidden`` may stand inside a module.
    """
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    return "mask_hidden" if name.endswith(".mask_hidden") else name


def is_speculators(config: Config) -> bool:
    return "speculators_model_type" in config or config.get("speculators_config") is not None


def flat_config(config: Config, file: str, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The flat config that a head is served with; its sizes and aux layers have the right types.

    HeadError where a field that no head can be read without is missing or malformed.

    Args:
        config: config.json as it stands; ``file`` names it in messages.
        tensors: by vLLM's names.
    """
    names = config.get("architectures") or []
    if is_speculators(config):
        flat = _flat_of_speculators(config, file)
    elif not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise HeadError(unfit("architectures", names, "a list of names", file))
    elif not names or names[0] in UNREGISTERED:
        has_norm = "layers.0.self_attn.q_norm.weight" in tensors
        # Without weights by model_type, which trainers copy from the target.
        is_qwen3 = has_norm if tensors else config.get("model_type") == "qwen3"
        copied = ("layer_types", "sliding_window") if names else ()  # from the target: NeMo and SpecForge train without
        flat = {**config, **dict.fromkeys(copied), "architectures": [OF_FAMILY["qwen3" if is_qwen3 else "llama"]]}
    else:
        prefixed = [n if n.startswith("Eagle3") or n.endswith("Eagle3") else f"Eagle3{n}" for n in names]
        flat = {**config, "architectures": prefixed}
    if flat.get("hidden_act") is None:
        flat["hidden_act"] = flat.get("hidden_activation")
    if not isinstance(flat.get("eagle_config") or {}, dict):
        raise HeadError(unfit("eagle_config", flat["eagle_config"], "a JSON object", file))
    for place, ids in aux_places(flat).items():
        if not isinstance(ids, list) or not all(is_whole(i) for i in ids):
            raise HeadError(unfit(place, ids, "a list of whole numbers", file))
    optional = ("draft_vocab_size", "num_aux_layers", "num_aux_hidden_states", "target_hidden_size")
    present = [key for key in optional if flat.get(key) is not None]
    for key in ("hidden_size", "vocab_size", "num_hidden_layers", *present):
        size(flat, key, file)
    drafting = [info for name, info in tensors.items() if name not in ("d2t", "t2d")]
    plain = (".weight", ".bias", "mask_hidden", "inv_freq")
    if drafting and all(info.dtype in FLOATS and info.name.endswith(plain) for info in drafting):
        flat |= dict.fromkeys(QUANTIZED)  # it says how the target is stored: NeMo copies the target's config
    return flat


def _flat_of_speculators(config: Config, file: str) -> dict[str, Any]:
    nested = config.get("transformer_layer_config")
    if not isinstance(nested, dict):
        raise HeadError(unfit("transformer_layer_config", nested, "a JSON object", file))
    kind, model_type = config.get("speculators_model_type"), nested.get("model_type", "llama")
    prefix = {"peagle": "Peagle", "eagle3": "Eagle3"}.get(kind) if isinstance(kind, str) else None
    layers = {"llama": "Llama", "qwen3": "Qwen3"}.get(model_type) if isinstance(model_type, str) else None
    flat = {
        **nested,
        "architectures": [f"{prefix}{layers}ForCausalLM"] if prefix and layers else [],
        "draft_vocab_size": config.get("draft_vocab_size"),
        "norm_before_fc": config.get("norm_before_fc", False),
        "norm_before_residual": config.get("norm_before_residual", kind == "eagle3"),
    }
    outside = [key for key in ("target_hidden_size", AUX_KEY) if config.get(key)]
    outside += ["fc_norm"] if not nested.get("fc_norm") and "fc_norm" in config else []
    if kind == "peagle" and "mask_token_id" in config and nested.get("mask_token_id") is None:
        outside.append("mask_token_id")
    outside += [key for key in QUANTIZED if config.get(key)]  # where compressed-tensors writes it, and vLLM looks first
    return flat | {key: config[key] for key in outside}


def mask_token(served: Config) -> tuple[object, str | None]:
    """(mask token id as it stands, its field), searched in vLLM's order; (None, field or None) when there is none."""
    if isinstance(of_dflash := served.get("dflash_config"), dict) and of_dflash.get("mask_token_id") is not None:
        return of_dflash["mask_token_id"], "dflash_config.mask_token_id"
    keys = [key for key in MASK_TOKEN_KEYS if key in served]
    key = next((key for key in keys if served[key] is not None), keys[0] if keys else None)
    return (served[key], key) if key else (None, None)


def aux_places(served: Config) -> dict[str, Any]:
    """Each field that names aux layers, by its path; empty where vLLM takes its default. The first one counts.

    Model Runner V2 looks at the top level only, V1 into ``eagle_config`` too, where most public heads have them.
    """
    nested = served.get("eagle_config") or {}
    places = {AUX_KEY: served.get(AUX_KEY), f"eagle_config.{AUX_KEY}": nested.get(AUX_KEY)}
    return {place: ids for place, ids in places.items() if ids not in (None, [])}


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers that vLLM captures when the head names none."""
    return (2, num_layers // 2, num_layers - 3)


def count_aux(served: Config, family: Family | None, tensors: Mapping[str, TensorInfo]) -> int:
    """How many aux hidden states ``fc`` is built for: the number in the config, else by its shape, else by the ids."""
    for key in ("num_aux_hidden_states",) if family == "llama" else ("num_aux_layers", "num_aux_hidden_states"):
        if served.get(key) is not None:
            return served[key]
    ids = next(iter(aux_places(served).values()), (0, 0, 0))
    return aux_of_fc(served, tensors) or len(ids)


def aux_of_fc(served: Config, tensors: Mapping[str, TensorInfo]) -> int | None:
    """How many aux hidden states ``fc`` takes by its shape; None where the shape does not show it."""
    fc = tensors.get("fc.weight")
    if fc is None or len(fc.shape) != 2 or not fc.shape[1] or is_quantized(served):
        return None
    count, rest = divmod(fc.shape[1], served.get("target_hidden_size") or served["hidden_size"])
    return None if rest else count


def is_quantized(served: Config) -> bool:
    return any(served.get(key) for key in QUANTIZED)


def trained_depth(config: Config) -> int | None:
    """Tokens drafted ahead in training: NeMo's ``num_depths``, or what a speculators head proposes."""
    spec = config.get("speculators_config")
    methods = spec.get("proposal_methods") if isinstance(spec, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    depth = first.get("speculative_tokens") if isinstance(first, dict) else config.get("num_depths")
    return depth if is_whole(depth) and depth > 0 else None


def size(config: Config, key: str, place: str) -> int:
    """A size from a config. Raises HeadError when it is missing or no whole number above 0."""
    if key not in config:
        raise HeadError(f"{key} is missing: {place}; add it")
    value = config[key]
    if not is_size(value):
        raise HeadError(unfit(key, value, "a whole number above 0", place))
    return value


def unfit(key: str, value: object, needs: str, place: str) -> str:
    """The line for a field with a value that cannot be used."""
    return f"{key} is {shown(value)}, needs {needs}: {place}; correct it"


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number; JSON's true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_size(value: object) -> TypeGuard[int]:
    return is_whole(value) and 0 < value < 2**31


class Kind(NamedTuple):
    """The values that a field can have: whether one fits, and what it needs to be."""

    fits: Callable[[Any], bool]
    needs: str


SIZE = Kind(is_size, "a whole number above 0")
POSITIVE = Kind(lambda v: type(v) in (int, float) and 0 < v < 1e30, "a number above 0")  # NaN is none
FLAG = Kind(lambda v: isinstance(v, bool), "true or false")  # vLLM takes "false" for true
