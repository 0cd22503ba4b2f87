"""A head's config.json in vLLM's eyes.

vLLM 0.32 and 0.33 read a head's config in one of two ways, and both are repeated here because a field in the wrong
place is not an error there: it is ignored, and a default drafts garbage in its stead.

    speculators format   transformer_layer_config, plus a few named fields   (configs/speculators/algos.py)
    any other            the config itself, its architecture under the prefix Eagle3   (configs/eagle.py)
"""

from collections.abc import Mapping
from typing import Any, Literal

from peagle_vllm.heads.files import HeadError, shown

Config = Mapping[str, Any]

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
SPECULATORS_ARCHITECTURES = {
    "peagle": {"llama": "PeagleLlamaForCausalLM", "qwen3": "PeagleQwen3ForCausalLM"},
    "eagle3": {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"},
}
# The architectures whose classes know mask_hidden, in vLLM's registry.
QWEN3_ARCHITECTURES = {"Eagle3Qwen3ForCausalLM", "PeagleQwen3ForCausalLM"}
LLAMA_ARCHITECTURES = {
    "Eagle3LlamaForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "LlamaForCausalLMEagle3",
    "PeagleLlamaForCausalLM",
}


def is_speculators(config: Config) -> bool:
    return "speculators_model_type" in config or config.get("speculators_config") is not None


def stock_config(config: Config, file: str) -> dict[str, Any]:
    """The flat config that vLLM by itself makes of ``config``. ``file`` is for messages."""
    if not is_speculators(config):
        names = _object_list(config, "architectures", file)
        if not all(isinstance(name, str) for name in names):
            raise HeadError(f"architectures is {shown(names)}, needs names: {file}; correct it")
        prefixed = [n if n.startswith("Eagle3") or n.endswith("Eagle3") else f"Eagle3{n}" for n in names]
        return {**config, "architectures": prefixed}
    nested = config.get("transformer_layer_config")
    if not isinstance(nested, dict):
        raise HeadError(f"transformer_layer_config is {shown(nested)}, needs a JSON object: {file}; correct it")
    kind = config.get("speculators_model_type")
    by_type = SPECULATORS_ARCHITECTURES.get(kind, {}) if isinstance(kind, str) else {}
    model_type = nested.get("model_type", "llama")
    architecture = by_type.get(model_type) if isinstance(model_type, str) else None
    served = {
        **nested,
        "architectures": [architecture] if architecture else [],
        "draft_vocab_size": config.get("draft_vocab_size"),
        "norm_before_fc": config.get("norm_before_fc", False),
        "norm_before_residual": config.get("norm_before_residual", kind == "eagle3"),
    }
    if config.get("target_hidden_size") is not None:
        served["target_hidden_size"] = config["target_hidden_size"]
    if config.get(AUX_KEY):
        served[AUX_KEY] = config[AUX_KEY]
    if kind == "peagle" and "mask_token_id" in config:
        served["pard_token"] = config["mask_token_id"]
    if kind == "eagle3":
        served["fc_norm"] = config.get("fc_norm", False)
    return served


def family_of(architecture: str | None) -> Literal["llama", "qwen3"] | None:
    """Which of vLLM's P-EAGLE classes an architecture name leads to."""
    if architecture in QWEN3_ARCHITECTURES:
        return "qwen3"
    return "llama" if architecture in LLAMA_ARCHITECTURES else None


def mask_token(config: Config, served: Config, file: str) -> tuple[object, str | None]:
    """(mask token id as it stands, its field), searched in vLLM's order; (None, field or None) when there is none."""
    dflash = _object(served, "dflash_config", file)
    if "mask_token_id" in dflash:
        return dflash["mask_token_id"], "dflash_config.mask_token_id"
    if served.get("mask_token_id") is not None:
        return served["mask_token_id"], "mask_token_id"
    for key in ("dspark_noise_token_id", "pard_token", "ptd_token_id"):
        if key in served:
            came_from_peagle = key == "pard_token" and is_speculators(config) and "pard_token" not in config
            return served[key], "mask_token_id" if came_from_peagle else key
    return None, None


def aux_layers(served: Config, file: str) -> tuple[tuple[int, ...] | None, str | None]:
    """(layer ids, their field), or (None, None) where vLLM takes its default.

    Model Runner V2 looks at the top level only, V1 into ``eagle_config`` too, where most public heads have them.
    """
    nested = _object(served, "eagle_config", file)
    for holder, key in ((served, AUX_KEY), (nested, f"eagle_config.{AUX_KEY}")):
        ids = holder.get(AUX_KEY)
        if ids in (None, []):
            continue
        if not isinstance(ids, list) or not all(is_whole(i) for i in ids):
            raise HeadError(f"{key} is {shown(ids)}, needs a list of whole numbers: {file}; correct it")
        return tuple(ids), key
    return None, None


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers that vLLM captures when the head names none."""
    return (2, num_layers // 2, num_layers - 3)


def count_aux(served: Config, family: str | None, file: str) -> int:
    """How many aux hidden states vLLM builds ``fc`` for. Its Llama class does not look at the top-level ids."""
    keys = ["num_aux_hidden_states"] if family == "llama" else ["num_aux_layers", "num_aux_hidden_states"]
    for key in keys:
        if served.get(key) is not None:
            return positive(served, key, file)
    nested = _object(served, "eagle_config", file).get(AUX_KEY)
    ids = nested if family == "llama" else served.get(AUX_KEY) or nested
    return len(ids) if isinstance(ids, list) and ids else 3


def trained_depth(config: Config) -> int | None:
    """Tokens drafted ahead in training: NeMo's ``num_depths``, or what a speculators head proposes."""
    spec = config.get("speculators_config")
    methods = spec.get("proposal_methods") if isinstance(spec, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    depth = first.get("speculative_tokens") if isinstance(first, dict) else config.get("num_depths")
    return depth if isinstance(depth, int) and is_whole(depth) and depth > 0 else None


def positive(served: Config, key: str, file: str, default: int | None = None) -> int:
    """A size from the config. Raises HeadError when it is missing or no whole number above 0."""
    value = served.get(key, default)
    if value is None and key not in served:
        raise HeadError(f"{key} is missing: {file}; add it")
    if not isinstance(value, int) or not is_whole(value) or not 0 < value < 2**31:
        raise HeadError(f"{key} is {shown(value)}, needs a whole number above 0: {file}; correct it")
    return value


def is_whole(value: object) -> bool:
    """Whether a value is a whole number; JSON's true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def _object(served: Config, key: str, file: str) -> Mapping[str, Any]:
    value = served.get(key) or {}
    if not isinstance(value, dict):
        raise HeadError(f"{key} is {shown(value)}, needs a JSON object: {file}; correct it")
    return value


def _object_list(config: Config, key: str, file: str) -> list[Any]:
    value = config.get(key) or []
    if not isinstance(value, list):
        raise HeadError(f"{key} is {shown(value)}, needs a list: {file}; correct it")
    return value
