"""Who wrote a head, and the config fields that vLLM needs to hear of in other words.

| dialect       | tell-tale                                            | what vLLM needs                            |
|---------------|------------------------------------------------------|--------------------------------------------|
| ``aws``       | ``ptd_token_id``, ``midlayer``                       | identity d2t left out                      |
| ``flat``      | the same, architecture ``LlamaForCausalLM``          | its own prefix ``Eagle3``                  |
| ``speculators`` | ``speculators_model_type``, nested layer config    | ``fc_norm`` and the number of aux states   |
| ``nemo``      | ``LlamaEagle3DraftModel``, names under ``model.``    | architecture, names without the prefix     |
| ``specforge`` | ``PEagleDraftModel`` in a flat config                | architecture, and the mask token id        |
| ``vllm``      | an architecture of vLLM's registry                   | nothing                                    |

``mapped_fields`` is the only place that says so in code; serving sets these fields on vLLM's config, and ``convert``
writes them down.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from peagle_vllm.heads.config import (
    AUX_KEY,
    Config,
    aux_layers,
    count_aux,
    family_of,
    is_speculators,
    positive,
)
from peagle_vllm.heads.files import TensorInfo
from peagle_vllm.heads.head import Dialect

NEMO = {"LlamaEagle3DraftModel", "LlamaPEagleDraftModel"}
SPECFORGE = {"PEagleDraftModel"}
OF_FAMILY = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}


def dialect_of(config: Config, tensor_names: Iterable[str]) -> Dialect:
    """Who wrote the head, by its tell-tales. ``tensor_names`` as they stand in the file."""
    first = first_architecture(config)
    if is_speculators(config):
        return "speculators"
    if first in NEMO or any(name.startswith("model.") for name in tensor_names):
        return "nemo"
    if first in SPECFORGE:
        return "specforge"
    if "ptd_token_id" in config:
        return "flat" if first == "LlamaForCausalLM" else "aws"
    return "vllm" if family_of(first) is not None else "unknown"


def mapped_fields(config: Config, stock: Config, tensors: Mapping[str, TensorInfo], file: str) -> dict[str, Any]:
    """The fields of vLLM's flat config that it does not find by itself, although the head's files hold them.

    Args:
        config: config.json as it stands.
        stock: the flat config that vLLM makes of it alone.
        tensors: by vLLM's names.
        file: config.json's name, for messages.
    """
    fields: dict[str, Any] = {}
    first = first_architecture(config)
    if not is_speculators(config) and (first is None or first in NEMO | SPECFORGE):
        fields["architectures"] = [OF_FAMILY[family_of_weights(stock, tensors)]]
    architectures = fields.get("architectures") or stock["architectures"]
    family = family_of(architectures[0]) if architectures else None

    ids, _ = aux_layers(stock, file)
    if ids is not None and not stock.get(AUX_KEY):
        fields[AUX_KEY] = list(ids)  # they stand inside eagle_config, where V2 does not look
    stated = [key for key in ("num_aux_layers", "num_aux_hidden_states") if stock.get(key) is not None]
    taken = _aux_of_fc(stock, tensors, file)
    if family is not None and not stated and taken and taken != count_aux({**stock, **fields}, family, file):
        fields["num_aux_hidden_states"] = taken
    if config.get("fc_norm") is True and not stock.get("fc_norm"):
        fields["fc_norm"] = True
    return fields


def first_architecture(config: Config) -> str | None:
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    return first if isinstance(first, str) else None


def family_of_weights(stock: Config, tensors: Mapping[str, TensorInfo]) -> str:
    """ "llama" or "qwen3", by the norms in the attention; trainers copy the target's model_type either way."""
    if tensors:
        return "qwen3" if "layers.0.self_attn.q_norm.weight" in tensors else "llama"
    return "qwen3" if stock.get("model_type") == "qwen3" else "llama"


def _aux_of_fc(stock: Config, tensors: Mapping[str, TensorInfo], file: str) -> int | None:
    """Aux hidden states that ``fc`` takes, by its shape; None where that does not tell."""
    fc = tensors.get("fc.weight")
    if fc is None or len(fc.shape) != 2 or not fc.shape[1] or stock.get("quantization_config"):
        return None
    width = positive(stock, "target_hidden_size", file, positive(stock, "hidden_size", file))
    count, rest = divmod(fc.shape[1], width)
    return None if rest else count
