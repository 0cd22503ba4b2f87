"""Any dialect into vLLM's own format, or into speculators': names, config, and the form of d2t. No weight changes.

What is left out carries nothing: the identity map of a full-vocabulary head, and tensors that serving never reads.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from peagle_vllm.heads.checks import Problem, check, check_head
from peagle_vllm.heads.config import AUX_KEY, OF_FAMILY, default_aux_layers
from peagle_vllm.heads.fields import TRAINED_DEPTH, vllm_fields
from peagle_vllm.heads.files import SELECTOR, SELECTOR_FOLDER, HeadError, TensorInfo, read_tensor
from peagle_vllm.heads.head import Head, read_head, read_map, target_ids
from peagle_vllm.heads.target import Target

Format = Literal["vllm", "speculators"]
OUTPUT = "lm_head.weight"
OF_MODEL_TYPE = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# What stands outside of the decoder layers' fields in speculators' format.
HEAD_FIELDS = ["draft_vocab_size", "target_hidden_size", AUX_KEY, "mask_token_id"]
HEAD_FIELDS += ["norm_before_residual", "norm_before_fc", SELECTOR]


def obstacles(head: Head, to: Format, target: Target | None) -> list[Problem]:
    """What keeps a head on this machine from being converted, and warnings; empty when all is well."""
    vocabulary = read_map(head)
    corrected = vocabulary.fault if vocabulary.form == "target ids" else None
    problems = [problem for problem in check(head, target) if problem.line != corrected]
    if to == "speculators" and head.is_quantized:
        line = f"quantized weights have no place in speculators' format: {head.config_file}; use --to vllm"
        problems.append(Problem(line))
    return problems


def convert(head: Head, folder: Path, to: Format, target: Target | None, kept: np.ndarray | None = None) -> None:
    """Write ``head`` into ``folder``, which is there. HeadError where a file cannot be read.

    Args:
        head: on this machine, and without ``obstacles`` that are errors.
        target: names the layers that vLLM would take by default, and the verifier of a speculators head.
        kept: int64 [draft vocabulary] draft ids to keep, ascending, of a head with an ``lm_head``; None: all.
    """
    assert head.folder is not None
    config = _config(head, to, target)
    # By vLLM's names, header and bytes of what serving reads. The vocabulary's map is written from its target ids.
    tensors = _map_tensors(target_ids(head), head.vocab_size) if head.is_reduced else {}
    for name, info in head.weights.items():
        tensors[name] = replace(info, name=name), read_tensor(head.folder, info)
    if kept is not None:
        info, raw = tensors[OUTPUT]
        rows = np.frombuffer(raw, np.uint8).reshape(info.shape[0], -1)[kept]
        smaller = replace(info, shape=(len(kept), *info.shape[1:]), num_bytes=rows.nbytes)
        tensors |= _map_tensors(target_ids(head)[kept], head.vocab_size)
        tensors[OUTPUT] = smaller, rows.tobytes()
        config["draft_vocab_size"] = len(kept)
    if to == "speculators" and "mask_hidden" in tensors:
        info, raw = tensors["mask_hidden"]
        tensors["mask_hidden"] = replace(info, shape=(1, 1, info.num_elements)), raw
    if head.config.get(SELECTOR):
        shutil.copytree(head.folder / SELECTOR_FOLDER, folder / SELECTOR_FOLDER)
    write_json(folder / "config.json", config)
    _write_safetensors(folder / "model.safetensors", dict(tensors.values()))
    if unfit := check_head(read_head(folder)):
        raise HeadError(f"the head written would be unfit ({unfit[0].line}); please report this")


def _map_tensors(ids: np.ndarray, vocab_size: int) -> dict[str, tuple[TensorInfo, bytes]]:
    """The vocabulary's map as vLLM reads it, and its ``t2d``.

    Args:
        ids: int64 [draft vocabulary] target id of each draft id.
    """
    marks = np.zeros(vocab_size, dtype=bool)
    marks[ids] = True
    offsets = (ids - np.arange(len(ids))).astype("<i8")
    return {
        "d2t": (TensorInfo("d2t", offsets.shape, "I64", "", offsets.nbytes), offsets.tobytes()),
        "t2d": (TensorInfo("t2d", marks.shape, "BOOL", "", marks.nbytes), marks.tobytes()),
    }


def _config(head: Head, to: Format, target: Target | None) -> dict[str, Any]:
    """The new config.json: what serving would give vLLM for the head, in the words of the format."""
    fields = {"model_type": head.family, "dtype": head.served.get("dtype"), **vllm_fields(head)}
    if fields[AUX_KEY] is None and target is not None:
        fields[AUX_KEY] = list(default_aux_layers(target.num_layers))
    if fields["layer_types"]:
        fields["use_sliding_window"] = True  # else transformers ignores the window of a flat Qwen3 config
    fields["rope_theta"] = fields["rope_parameters"]["rope_theta"]  # where transformers before 5 looks for it
    fields = {key: value for key, value in fields.items() if value is not None}
    assert head.family is not None
    if to == "vllm":
        return {**fields, "architectures": [OF_FAMILY[head.family]]}
    fields.pop(TRAINED_DEPTH, None)
    outside = {key: fields.pop(key) for key in HEAD_FIELDS if key in fields}
    # vLLM looks for fc_norm among the layers' fields.
    outside |= {key: fields[key] for key in ("fc_norm", "dtype") if key in fields}
    return {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": "peagle",
        "speculators_config": _speculators_config(head, target),
        **outside,
        "norm_output": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": {**fields, "architectures": [OF_MODEL_TYPE[head.family]]},
    }


def _speculators_config(head: Head, target: Target | None) -> dict[str, Any]:
    old = head.config.get("speculators_config")
    if isinstance(old, dict) and target is None:
        return old
    method = {"proposal_type": "greedy", "speculative_tokens": head.trained_depth or 7}  # vLLM wants a number
    return {
        "algorithm": "peagle",
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"name_or_path": target.name if target else None, "architectures": []},
    }


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_safetensors(path: Path, tensors: Mapping[TensorInfo, bytes]) -> None:
    # Wide numbers first keeps every tensor aligned, as the safetensors library does it.
    ordered = sorted(tensors, key=lambda info: (-info.num_bytes // max(info.num_elements, 1), info.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for info in ordered:
        begin, end = end, end + info.num_bytes
        header[info.name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.writelines(tensors[info] for info in ordered)
