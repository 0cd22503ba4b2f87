"""A head's config.json as vLLM reads it, and the fields that vLLM needs but does not find there.

vLLM 0.32 and 0.33 read a head's config in one of two ways. Both are repeated here, because vLLM ignores a field in the
wrong place, and then drafts badly with a default.

    speculators format   transformer_layer_config, plus a few named fields   (configs/speculators/algos.py)
    any other            the config itself, its architecture under the prefix Eagle3   (configs/eagle.py)

docs/heads.md says how each dialect is recognised, and what serving maps for vLLM. A new one goes into ``Dialect``,
``dialect_of`` (before "nemo", which takes every ``model.`` prefix), ``mapped_fields`` (which serving sets on vLLM's
config, and ``convert`` writes) and ``vllm_name``; then, with its name, into ``DIALECTS`` of head_report.py,
tests/support/dialects.py, tests/heads/writers.py, tests/drafts/dialects.py, and the table in docs/heads.md.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeGuard

from peagle_vllm.heads.files import SELECTOR, HeadError, TensorInfo, shown

Config = Mapping[str, Any]
Dialect = Literal["aws", "speculators", "nemo", "specforge", "flat", "vllm", "unknown"]
Family = Literal["llama", "qwen3"]

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
NEMO = {"LlamaEagle3DraftModel", "LlamaPEagleDraftModel"}
SPECFORGE = {"PEagleDraftModel"}
OF_FAMILY = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
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


def vllm_name(name: str) -> str:
    """A tensor's name as vLLM's P-EAGLE classes take it.

    NeMo puts ``model.`` before every name but lm_head's, AWS and SpecForge call the first layer ``midlayer``, and
    ``mask_hidden`` may stand inside a module.
    """
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    return "mask_hidden" if name.endswith(".mask_hidden") else name


def is_speculators(config: Config) -> bool:
    return "speculators_model_type" in config or config.get("speculators_config") is not None


def dialect_of(config: Config, tensor_names: Iterable[str]) -> Dialect:
    """Which library wrote the head. ``tensor_names`` as they stand in the file."""
    first = _first_architecture(config)
    if is_speculators(config):
        return "speculators"
    if first in NEMO or any(name.startswith("model.") for name in tensor_names):
        return "nemo"
    if first in SPECFORGE:
        return "specforge"
    if "ptd_token_id" in config:
        return "flat" if first == "LlamaForCausalLM" else "aws"
    return "vllm" if family_of(first) is not None else "unknown"


def family_of(architecture: str | None) -> Family | None:
    """Which of vLLM's P-EAGLE classes an architecture name leads to."""
    if architecture in QWEN3_ARCHITECTURES:
        return "qwen3"
    return "llama" if architecture in LLAMA_ARCHITECTURES else None


def stock_config(config: Config, file: str) -> dict[str, Any]:
    """The flat config that vLLM by itself makes of ``config``; its sizes and aux layers have the right types.

    Raises:
        HeadError: a field that no head can be read without is missing or malformed; ``file`` is for that line.
    """
    if is_speculators(config):
        stock = _flat_of_speculators(config, file)
    else:
        names = config.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise HeadError(unfit("architectures", names, "a list of names", file))
        prefixed = [n if n.startswith("Eagle3") or n.endswith("Eagle3") else f"Eagle3{n}" for n in names]
        stock = {**config, "architectures": prefixed}
    for key in ("dflash_config", "eagle_config"):
        if not isinstance(stock.get(key) or {}, dict):
            raise HeadError(unfit(key, stock[key], "a JSON object", file))
    for place, ids in aux_places(stock).items():
        if not isinstance(ids, list) or not all(is_whole(i) for i in ids):
            raise HeadError(unfit(place, ids, "a list of whole numbers", file))
    optional = ("draft_vocab_size", "num_aux_layers", "num_aux_hidden_states")
    stated = [key for key in optional if stock.get(key) is not None]
    stated += ["target_hidden_size"] if "target_hidden_size" in stock else []
    for key in ("hidden_size", "vocab_size", "num_hidden_layers", *stated):
        size(stock, key, file)
    return stock


def _flat_of_speculators(config: Config, file: str) -> dict[str, Any]:
    nested = config.get("transformer_layer_config")
    if not isinstance(nested, dict):
        raise HeadError(unfit("transformer_layer_config", nested, "a JSON object", file))
    kind, model_type = config.get("speculators_model_type"), nested.get("model_type", "llama")
    prefix = {"peagle": "Peagle", "eagle3": "Eagle3"}.get(kind) if isinstance(kind, str) else None
    layers = {"llama": "Llama", "qwen3": "Qwen3"}.get(model_type) if isinstance(model_type, str) else None
    stock = {
        **nested,
        "architectures": [f"{prefix}{layers}ForCausalLM"] if prefix and layers else [],
        "draft_vocab_size": config.get("draft_vocab_size"),
        "norm_before_fc": config.get("norm_before_fc", False),
        "norm_before_residual": config.get("norm_before_residual", kind == "eagle3"),
    }
    if config.get("target_hidden_size") is not None:
        stock["target_hidden_size"] = config["target_hidden_size"]
    if config.get(AUX_KEY):
        stock[AUX_KEY] = config[AUX_KEY]
    if kind == "peagle" and "mask_token_id" in config:
        stock["pard_token"] = config["mask_token_id"]
    if kind == "eagle3":
        stock["fc_norm"] = config.get("fc_norm", False)
    return stock


def mapped_fields(config: Config, stock: Config, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The fields of vLLM's flat config that it does not find by itself, although the head's files hold them.

    Args:
        config: config.json as it stands.
        stock: ``stock_config`` of it.
        tensors: by vLLM's names.
    """
    fields: dict[str, Any] = {}
    first = _first_architecture(config)
    if not is_speculators(config) and (first is None or first in NEMO | SPECFORGE):
        fields["architectures"] = [OF_FAMILY[_family_of_weights(stock, tensors)]]
    architectures = fields.get("architectures") or stock["architectures"]
    family = family_of(architectures[0]) if architectures else None

    ids = aux_places(stock).get(f"eagle_config.{AUX_KEY}")
    if ids and not stock.get(AUX_KEY):
        fields[AUX_KEY] = list(ids)  # V2 does not look into eagle_config
    stated = stock.get("num_aux_layers") or stock.get("num_aux_hidden_states")
    taken = aux_of_fc(stock, tensors)
    if family is not None and not stated and taken and taken != count_aux({**stock, **fields}, family):
        fields["num_aux_hidden_states"] = taken
    if config.get("fc_norm") is True and not stock.get("fc_norm"):
        fields["fc_norm"] = True
    if is_speculators(config) and config.get(SELECTOR) is not None:
        fields[SELECTOR] = config[SELECTOR]
    if stock.get("hidden_act") is None:
        fields["hidden_act"] = stock.get("hidden_activation") or "silu"
    return fields


def _first_architecture(config: Config) -> str | None:
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    return first if isinstance(first, str) else None


def _family_of_weights(stock: Config, tensors: Mapping[str, TensorInfo]) -> Family:
    """qwen3 if the attention has q_norm; without weights by model_type, which trainers copy from the target."""
    if tensors:
        return "qwen3" if "layers.0.self_attn.q_norm.weight" in tensors else "llama"
    return "qwen3" if stock.get("model_type") == "qwen3" else "llama"


def mask_token(config: Config, served: Config) -> tuple[object, str | None]:
    """(mask token id as it stands, its field), searched in vLLM's order; (None, field or None) when there is none."""
    dflash = served.get("dflash_config") or {}
    if "mask_token_id" in dflash:
        return dflash["mask_token_id"], "dflash_config.mask_token_id"
    if served.get("mask_token_id") is not None:
        return served["mask_token_id"], "mask_token_id"
    for key in ("dspark_noise_token_id", "pard_token", "ptd_token_id"):
        if key in served:
            came_from_peagle = key == "pard_token" and is_speculators(config) and "pard_token" not in config
            return served[key], "mask_token_id" if came_from_peagle else key
    return None, None


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


def count_aux(served: Config, family: str | None) -> int:
    """How many aux hidden states vLLM builds ``fc`` for. Its Llama class does not look at the top-level ids."""
    for key in ("num_aux_hidden_states",) if family == "llama" else ("num_aux_layers", "num_aux_hidden_states"):
        if served.get(key) is not None:
            return served[key]
    places = aux_places(served)
    ids = places.get(f"eagle_config.{AUX_KEY}")
    return len((ids if family == "llama" else places.get(AUX_KEY) or ids) or (0, 0, 0))


def aux_of_fc(served: Config, tensors: Mapping[str, TensorInfo]) -> int | None:
    """How many aux hidden states ``fc`` takes by its shape; None where the shape does not show it."""
    fc = tensors.get("fc.weight")
    if fc is None or len(fc.shape) != 2 or not fc.shape[1] or is_quantized(served):
        return None
    count, rest = divmod(fc.shape[1], served.get("target_hidden_size") or served["hidden_size"])
    return None if rest else count


def is_quantized(served: Config) -> bool:
    return bool(served.get("quantization_config") or served.get("compression_config"))


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
