"""Any dialect into vLLM's own format, or into speculators': names, config, and the form of d2t. No weight changes.

What is left out carries nothing: the identity map of a full-vocabulary head, and tensors that serving never reads.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from peagle_vllm.heads.checks import Problem, check_head, check_pair, check_presence
from peagle_vllm.heads.config import AUX_KEY, OF_FAMILY, default_aux_layers
from peagle_vllm.heads.files import HeadError, TensorInfo
from peagle_vllm.heads.head import Head, read_head
from peagle_vllm.heads.target import Target
from peagle_vllm.heads.vocabulary import TARGET_IDS, read_map
from peagle_vllm.heads.writer import Part, new_folder, write_json, write_safetensors

Format = Literal["vllm", "speculators"]
WEIGHTS = "model.safetensors"
MASK_KEYS = ("dflash_config", "dspark_noise_token_id", "pard_token", "ptd_token_id")
# transformers fills these in for a flat config; a speculators config must state them.
DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False}
DEFAULT_POSITIONS = {"qwen3": 32768}
OWN_FIELDS = (  # of a head, beside the layers'
    *("draft_vocab_size", AUX_KEY, "eagle_config", "fc_norm", "mask_token_id", "norm_before_fc"),
    *("norm_before_residual", "norm_output", "num_aux_hidden_states", "num_aux_layers", "num_depths"),
    "target_hidden_size",
)
OF_A_FORMAT = ("auto_map", "speculators_config", "speculators_model_type", "speculators_version", "_name_or_path")


def with_mask_token(head: Head, mask_token_id: int | None) -> Head:
    """The head as if its config named this mask token; None changes nothing."""
    if mask_token_id is None:
        return head
    return replace(head, mask_token_id=mask_token_id, mask_token_key="--mask-token-id")


def obstacles(head: Head, to: Format, target: Target | None) -> list[Problem]:
    """What keeps the head from being converted, and warnings; empty when all is well.

    Raises:
        HeadError: its weights are not on this machine.
    """
    if head.folder is None:
        raise HeadError(f"{head.name} is not on this machine; convert needs its weights")
    found = check_head(head) if target is None else check_pair(head, target)
    # What is wrong with the form of d2t is mended on the way.
    problems = [problem for problem in found if not problem.line.startswith(TARGET_IDS)] + check_presence(head)
    fused = [name for name in head.tensors if ".qkv_proj." in name or ".gate_up_proj." in name]
    if to == "speculators" and fused:
        line = f"{fused[0]} is a fused weight, which speculators' format does not have: {head.name}; use --to vllm"
        problems.append(Problem(line))
    if to == "speculators" and head.served.get("quantization_config"):
        line = f"quantized weights have no place in speculators' format: {head.config_file}; use --to vllm"
        problems.append(Problem(line))
    return problems


def convert(
    head: Head, out: Path, to: Format, target: Target | None, on_write: Callable[[int], object] = lambda count: None
) -> Head:
    """Write ``head`` as ``out`` and return what stands there, read again.

    Args:
        head: without ``obstacles`` that are errors.
        target: names the layers that vLLM would take by default, and the verifier of a speculators head.
        on_write: called with the number of bytes after each piece that is written.

    Raises:
        HeadError: a file cannot be read or written, a weight is NaN or Inf; ``out`` does not exist then.
    """
    with new_folder(out) as work:
        write_json(work / "config.json", config_for(head, to, target))
        write_safetensors(work / WEIGHTS, parts_of(head, to), on_write)
        unsound = check_head(read_head(work))
        if unsound:
            raise HeadError(f"the converted head would be unfit ({unsound[0].line}); please report this")
    return read_head(out)


# ------------------------------------------------------------------------------------------- tensors


def parts_of(head: Head, to: Format) -> list[Part]:
    """What the new file holds. Weights are copied byte by byte; only the vocabulary's map may be written anew."""
    assert head.folder is not None
    parts = []
    for name, info in head.tensors.items():
        if name in ("d2t", "t2d") or name.endswith("rotary_emb.inv_freq"):
            continue
        shape = (1, 1, info.num_elements) if name == "mask_hidden" and to == "speculators" else info.shape
        parts.append(Part(TensorInfo(name, shape, info.dtype, WEIGHTS), (head.folder, info)))
    return parts + _map_parts(head) if head.is_reduced else parts


def _map_parts(head: Head) -> list[Part]:
    import numpy as np

    found, fault = read_map(head)
    if found is None:
        raise HeadError(f"d2t {fault}: {head.file_of('d2t')}; store it as offsets (target id - draft id)")
    targets = found.target_ids
    marks = np.zeros(head.vocab_size, dtype=bool)
    marks[targets] = True
    offsets = (targets - np.arange(len(targets))).astype("<i8")
    return [
        Part(TensorInfo("d2t", offsets.shape, "I64", WEIGHTS), offsets.tobytes()),
        Part(TensorInfo("t2d", marks.shape, "BOOL", WEIGHTS), marks.tobytes()),
    ]


# -------------------------------------------------------------------------------------------- config


def config_for(head: Head, to: Format, target: Target | None) -> dict[str, Any]:
    """The new config.json, in which every field that matters is stated."""
    assert head.family is not None
    layers, own = _layer_fields(head), _own_fields(head, target)
    needed, fc_norm = head.aux_needed, head.norms["fc_norm"]
    if to == "vllm":
        if layers.get("layer_types") and layers["model_type"] == "qwen3":
            layers["use_sliding_window"] = "sliding_attention" in layers["layer_types"]
        own |= {"num_depths": head.trained_depth} if head.trained_depth else {}
        return {
            **layers,
            "architectures": [OF_FAMILY[head.family]],
            **own,
            "fc_norm": fc_norm,
            "num_aux_hidden_states": needed,
        }
    layers["model_type"] = head.family
    layers["architectures"] = ["Qwen3ForCausalLM" if head.family == "qwen3" else "LlamaForCausalLM"]
    # vLLM looks for these two among the layers' fields, the speculators library beside them.
    layers |= {"fc_norm": fc_norm} if fc_norm else {}
    layers |= {"num_aux_hidden_states": needed} if needed != 3 else {}
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
    ids = head.aux_layer_ids
    if ids is None and target is not None:
        ids = default_aux_layers(target.num_layers)
    return {
        "draft_vocab_size": head.draft_vocab_size,
        "target_hidden_size": head.target_hidden_size,
        **({AUX_KEY: list(ids)} if ids is not None else {}),
        "mask_token_id": head.mask_token_id,
        "norm_before_residual": head.norms["norm_before_residual"],
        "norm_before_fc": head.norms["norm_before_fc"],
    }


def _layer_fields(head: Head) -> dict[str, Any]:
    """The decoder layers' fields, with what transformers would fill in; nothing of any format."""
    left_out = {*MASK_KEYS, *OF_A_FORMAT, *OWN_FIELDS}
    served = {key: value for key, value in head.served.items() if key not in left_out}
    model_type = str(served.setdefault("model_type", head.family))
    fields = {**DEFAULTS, "max_position_embeddings": DEFAULT_POSITIONS.get(model_type, 2048), **served}
    fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    fields["head_dim"] = head.head_dim
    if not any(fields.get(key) for key in ("rope_parameters", "rope_theta")):
        fields["rope_theta"] = 10000.0
    # transformers ignores the window of a flat Qwen3 config without use_sliding_window.
    if model_type == "qwen3" and not head.is_speculators and not fields.get("use_sliding_window"):
        return {key: value for key, value in fields.items() if key not in ("layer_types", "sliding_window")}
    return fields


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
