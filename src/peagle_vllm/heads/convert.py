"""Any dialect into vLLM's own format, or into speculators': names, config, and the form of d2t. No weight changes.

What is left out carries nothing: the identity map of a full-vocabulary head, and tensors that serving never reads.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from peagle_vllm.heads.checks import aux_needed, check_head
from peagle_vllm.heads.config import AUX_KEY, default_aux_layers, is_speculators
from peagle_vllm.heads.dialects import OF_FAMILY
from peagle_vllm.heads.files import HeadError
from peagle_vllm.heads.head import Head, Problem
from peagle_vllm.heads.reader import read_head
from peagle_vllm.heads.target import Target
from peagle_vllm.heads.values import Advance
from peagle_vllm.heads.vocabulary import form_of_d2t, known_targets, target_ids
from peagle_vllm.heads.writer import Part, new_folder, write_json, write_safetensors

Format = Literal["vllm", "speculators"]
WEIGHTS = "model.safetensors"
MASK_KEYS = ("dflash_config", "dspark_noise_token_id", "pard_token", "ptd_token_id")
# What transformers fills in for a flat config, and nobody for a speculators one.
DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False}
DEFAULT_POSITIONS = {"qwen3": 32768}
HERE_ONLY = ("auto_map", "speculators_config", "speculators_model_type", "speculators_version", "_name_or_path")
AUX_AND_NORMS = ("fc_norm", "norm_output", "num_aux_hidden_states", "num_aux_layers")
OWN_FIELDS = (  # of a speculators config, beside the layers'
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "mask_token_id",
    "norm_before_fc",
    "norm_before_residual",
    "num_depths",
    "target_hidden_size",
)


def with_mask_token(head: Head, mask_token_id: int | None) -> Head:
    """The head as if its config named this mask token; None changes nothing."""
    if mask_token_id is None:
        return head
    return replace(head, mask_token_id=mask_token_id, mask_token_key="--mask-token-id")


def obstacles(head: Head, to: Format) -> list[Problem]:
    """What keeps the head from being converted; empty when nothing does."""
    problems = [problem for problem in check_head(head) if not problem.by_convert]
    if head.folder is None:
        raise HeadError(f"{head.name} is not on this machine; convert needs its weights")
    if not head.tensors:
        problems.append(Problem(f"no *.safetensors: {head.name}; pickled weights are never read, save them as such"))
    odd = [name for name in head.tensors if ".qkv_proj." in name or ".gate_up_proj." in name]
    if to == "speculators" and odd:
        problems.append(
            Problem(f"{odd[0]} is a fused weight, which speculators' format does not have: {head.name}; use --to vllm")
        )
    if to == "speculators" and head.served.get("quantization_config"):
        problems.append(
            Problem(f"quantized weights have no place in speculators' format: {head.config_file}; use --to vllm")
        )
    return problems


def convert(head: Head, out: Path, to: Format, target: Target | None, advance: Advance = lambda count: None) -> Head:
    """Write ``head`` as ``out`` and return what stands there, read again.

    Args:
        head: without ``obstacles``.
        target: names the layers that vLLM would take by default, and the verifier of a speculators head.
        advance: is told of bytes written.

    Raises:
        HeadError: a file cannot be read or written, a weight is NaN or Inf; ``out`` does not exist then.
    """
    with new_folder(out) as work:
        write_json(work / "config.json", config_for(head, to, target))
        write_safetensors(work / WEIGHTS, parts_of(head, to), advance)
        unsound = check_head(read_head(work))
        if unsound:
            raise HeadError(f"the converted head would be unfit ({unsound[0].line}); please report this")
    return read_head(out)


def num_bytes(head: Head, to: Format) -> int:
    """Bytes of weights that ``convert`` will write."""
    return sum(len(p.source) if isinstance(p.source, bytes) else 0 for p in parts_of(head, to)) + sum(
        info.num_bytes for name, info in head.tensors.items() if name not in ("d2t", "t2d")
    )


# ------------------------------------------------------------------------------------------- tensors


def parts_of(head: Head, to: Format) -> list[Part]:
    """What the new file holds. Weights are copied byte by byte; only the vocabulary's map may be written anew."""
    assert head.folder is not None
    parts = []
    for name, info in head.tensors.items():
        if name in ("d2t", "t2d") or name.endswith("rotary_emb.inv_freq"):
            continue
        shape = (1, 1, info.num_elements) if name == "mask_hidden" and to == "speculators" else info.shape
        parts.append(Part(name, info.dtype, shape, (head.folder / info.file, info.name)))
    if head.draft_vocab_size != head.vocab_size:
        parts += _map_parts(head)
    return parts


def _map_parts(head: Head) -> list[Part]:
    import numpy as np

    d2t = head.values("d2t")
    assert d2t is not None
    form, fault = form_of_d2t(d2t, known_targets(head), head.vocab_size)
    if form is None:
        raise HeadError(f"d2t {fault}: {head.file_of('d2t')}; store it as offsets (target id - draft id)")
    targets = target_ids(d2t, form)
    marks = np.zeros(head.vocab_size, dtype=bool)
    marks[targets] = True
    offsets = (targets - np.arange(len(targets))).astype("<i8")
    return [
        Part("d2t", "I64", offsets.shape, offsets.tobytes()),
        Part("t2d", "BOOL", marks.shape, marks.tobytes()),
    ]


# -------------------------------------------------------------------------------------------- config


def config_for(head: Head, to: Format, target: Target | None) -> dict[str, Any]:
    """The new config.json, in which every field that matters is stated."""
    return _flat(head, target) if to == "vllm" else _nested(head, target)


def _flat(head: Head, target: Target | None) -> dict[str, Any]:
    assert head.family is not None
    layers = _layer_fields(head)
    if layers.get("layer_types") and layers["model_type"] == "qwen3":
        layers["use_sliding_window"] = "sliding_attention" in layers["layer_types"]
    return {
        **layers,
        "architectures": [OF_FAMILY[head.family]],
        **_own_fields(head, target),
        **({"num_depths": head.trained_depth} if head.trained_depth else {}),
        "fc_norm": bool(head.served.get("fc_norm", False)),
        "num_aux_hidden_states": aux_needed(head),
    }


def _nested(head: Head, target: Target | None) -> dict[str, Any]:
    assert head.family is not None
    layers = {**_layer_fields(head), "model_type": head.family}
    layers["architectures"] = ["Qwen3ForCausalLM" if head.family == "qwen3" else "LlamaForCausalLM"]
    fc_norm = bool(head.served.get("fc_norm", False))
    own = _own_fields(head, target)
    # vLLM looks for these two among the layers' fields, the speculators library beside them.
    layers |= {"fc_norm": fc_norm} if fc_norm else {}
    layers |= {"num_aux_hidden_states": aux_needed(head)} if aux_needed(head) != 3 else {}
    return {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": "peagle",
        "speculators_config": _speculators_config(head, target),
        **own,
        "fc_norm": fc_norm,
        "norm_output": False,
        **({"dtype": layers["dtype"]} if layers.get("dtype") else {}),
        "tie_word_embeddings": False,
        "transformer_layer_config": layers,
    }


def _own_fields(head: Head, target: Target | None) -> dict[str, Any]:
    """What both formats state by the same names."""
    served = head.served
    eagle = served.get("eagle_config") or {}
    ids = head.aux_layer_ids
    if ids is None and target is not None:
        ids = default_aux_layers(target.num_layers)
    return {
        "draft_vocab_size": head.draft_vocab_size,
        "target_hidden_size": head.target_hidden_size,
        **({AUX_KEY: list(ids)} if ids is not None else {}),
        "mask_token_id": head.mask_token_id,
        "norm_before_residual": bool(served.get("norm_before_residual", False)),
        "norm_before_fc": bool(eagle.get("norm_before_fc", served.get("norm_before_fc", False))),
    }


def _layer_fields(head: Head) -> dict[str, Any]:
    """The decoder layers' fields, with what transformers would fill in; nothing of any format."""
    left_out = {
        *MASK_KEYS,
        *HERE_ONLY,
        *OWN_FIELDS,
        "fc_norm",
        "num_aux_hidden_states",
        "num_aux_layers",
        "norm_output",
    }
    served = {key: value for key, value in head.served.items() if key not in left_out}
    served.setdefault("model_type", head.family)
    model_type = served["model_type"]
    fields = {**DEFAULTS, "max_position_embeddings": DEFAULT_POSITIONS.get(model_type, 2048), **served}
    fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    if fields.get("head_dim") is None:
        defaulted = model_type == "qwen3" and not is_speculators(head.config)
        fields["head_dim"] = 128 if defaulted else fields["hidden_size"] // fields["num_attention_heads"]
    return _with_rope(_without_unused_window(fields, head.config))


def _without_unused_window(fields: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers ignores the window of a flat Qwen3 config without ``use_sliding_window``."""
    unused = fields["model_type"] == "qwen3" and not is_speculators(config) and not fields.get("use_sliding_window")
    if unused:
        return {key: value for key, value in fields.items() if key not in ("layer_types", "sliding_window")}
    return fields


def _with_rope(fields: dict[str, Any]) -> dict[str, Any]:
    stated = any(fields.get(key) for key in ("rope_parameters", "rope_theta"))
    return fields if stated else {**fields, "rope_theta": 10000.0}


def _speculators_config(head: Head, target: Target | None) -> dict[str, Any]:
    old = head.config.get("speculators_config")
    if isinstance(old, dict) and target is None:
        return old
    method = {"proposal_type": "greedy", "speculative_tokens": head.trained_depth or 5}
    return {
        "algorithm": "peagle",
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"name_or_path": target.name if target else None, "architectures": []},
    }
