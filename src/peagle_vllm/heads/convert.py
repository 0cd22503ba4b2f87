"""Any dialect into vLLM's own format, or into speculators': names, config, and the form of d2t. No weight changes.

What is left out carries nothing: the identity map of a full-vocabulary head, and tensors that serving never reads.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from peagle_vllm.heads.check_weights import not_finite
from peagle_vllm.heads.checks import Problem, check, check_head
from peagle_vllm.heads.config import AUX_KEY, OF_FAMILY, default_aux_layers
from peagle_vllm.heads.fields import rope_of_head, windows
from peagle_vllm.heads.files import SELECTOR, SELECTOR_FOLDER, HeadError, TensorInfo, is_finite, read_pieces
from peagle_vllm.heads.head import Head, read_head, read_map, target_ids
from peagle_vllm.heads.rope import ELSEWHERE
from peagle_vllm.heads.target import Target

Format = Literal["vllm", "speculators"]
OUTPUT = "lm_head.weight"
MASK_KEYS = ("dflash_config", "dspark_noise_token_id", "pard_token", "ptd_token_id")
# transformers fills these in for a flat config; a speculators config must state them.
DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False}
DEFAULT_POSITIONS = {"qwen3": 32768}
OWN_FIELDS = (  # of a head, not of its layers
    *("draft_vocab_size", AUX_KEY, "eagle_config", "fc_norm", "mask_token_id", "norm_before_fc"),
    *("norm_before_residual", "norm_output", "num_aux_hidden_states", "num_aux_layers", "num_depths"),
    *("target_hidden_size", SELECTOR),
)
ROPE_FIELDS = ("rope_parameters", "rope_scaling", *(name for names in ELSEWHERE.values() for name in names))
WINDOW_FIELDS = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")
OF_A_FORMAT = ("auto_map", "speculators_config", "speculators_model_type", "speculators_version", "_name_or_path")


def obstacles(head: Head, to: Format, target: Target | None) -> list[Problem]:
    """What keeps a head on this machine from being converted, and warnings; empty when all is well."""
    mended = read_map(head)
    fault = mended.fault if mended.form == "target ids" else None
    problems = [problem for problem in check(head, target) if problem.line != fault]
    if to == "speculators" and head.served.get("quantization_config"):
        line = f"quantized weights have no place in speculators' format: {head.config_file}; use --to vllm"
        problems.append(Problem(line))
    return problems


def with_window(head: Head, window: int) -> Head:
    """``head`` with layers that each see the last ``window`` tokens, their own included."""
    sliding = {"layer_types": ["sliding_attention"] * head.num_layers, "sliding_window": window}
    if head.served.get("model_type") == "qwen3":
        sliding["use_sliding_window"] = True  # else transformers ignores it
    return replace(head, served={**head.served, **sliding})


def convert(
    head: Head,
    folder: Path,
    to: Format,
    target: Target | None,
    on_write: Callable[[int], object] = lambda count: None,
    kept: np.ndarray | None = None,
) -> None:
    """Write ``head`` into ``folder``, which is there.

    Args:
        head: on this machine, and without ``obstacles`` that are errors.
        target: names the layers that vLLM would take by default, and the verifier of a speculators head.
        on_write: called with the number of bytes before each piece that is written.
        kept: int64 [draft vocabulary] draft ids to keep, ascending, of a head with an ``lm_head``; None: all.

    Raises:
        HeadError: a file cannot be read, a weight is NaN or Inf.
        OSError: ``folder`` cannot be written.
    """
    tensors, config = copied_tensors(head, on_write), config_for(head, to, target)
    if kept is not None:
        info, pieces = tensors[OUTPUT]
        num_bytes = info.num_bytes // info.shape[0]
        smaller = replace(info, shape=(len(kept), *info.shape[1:]), num_bytes=num_bytes * len(kept))
        tensors |= map_tensors(target_ids(head)[kept], head.vocab_size)
        tensors[OUTPUT] = smaller, _rows(pieces, num_bytes, kept)
        config["draft_vocab_size"] = len(kept)
    if to == "speculators" and "mask_hidden" in tensors:
        info, pieces = tensors["mask_hidden"]
        tensors["mask_hidden"] = replace(info, shape=(1, 1, info.num_elements)), pieces
    if head.config.get(SELECTOR):
        assert head.folder is not None
        shutil.copytree(head.folder / SELECTOR_FOLDER, folder / SELECTOR_FOLDER)
    write_head(folder, config, dict(tensors.values()))


def write_head(folder: Path, config: Mapping[str, Any], tensors: Mapping[TensorInfo, Iterable[bytes]]) -> None:
    """Write a head's two files. Raises HeadError when what stands there then is unfit."""
    write_json(folder / "config.json", config)
    write_safetensors(folder / "model.safetensors", tensors)
    unsound = check_head(read_head(folder))
    if unsound:
        raise HeadError(f"the head written would be unfit ({unsound[0].line}); please report this")


# ------------------------------------------------------------------------------------------- tensors


def _pieces(head: Head, name: str, on_write: Callable[[int], object]) -> Iterator[bytes]:
    """A tensor's bytes as they stand in the file; HeadError at NaN or Inf."""
    assert head.folder is not None
    info = head.tensors[name]
    for raw in read_pieces(head.folder, info):
        if not is_finite(raw, info.dtype):
            raise HeadError(*not_finite(head, [name]))
        on_write(len(raw))
        yield raw


def _rows(pieces: Iterable[bytes], num_bytes: int, kept: np.ndarray) -> Iterator[bytes]:
    """The bytes of the rows ``kept`` of a tensor whose rows are ``num_bytes`` long."""
    begun, first = b"", 0
    for piece in pieces:
        begun += piece
        count = len(begun) // num_bytes
        rows = np.frombuffer(begun, np.uint8, count * num_bytes).reshape(count, num_bytes)
        yield rows[kept[(kept >= first) & (kept < first + count)] - first].tobytes()
        begun, first = begun[count * num_bytes :], first + count


def copied_tensors(
    head: Head, on_write: Callable[[int], object] = lambda count: None
) -> dict[str, tuple[TensorInfo, Iterable[bytes]]]:
    """Every tensor that serving reads, by vLLM's names: its header and its bytes.

    The vocabulary's map is written from its target ids.
    """
    tensors = map_tensors(target_ids(head), head.vocab_size) if head.is_reduced else {}
    for name, info in head.tensors.items():
        if name not in ("d2t", "t2d") and not name.endswith("rotary_emb.inv_freq"):
            tensors[name] = replace(info, name=name), _pieces(head, name, on_write)
    return tensors


def map_tensors(ids: np.ndarray, vocab_size: int) -> dict[str, tuple[TensorInfo, Iterable[bytes]]]:
    """The vocabulary's map as vLLM reads it, and its ``t2d``.

    Args:
        ids: int64 [draft vocabulary] target id of each draft id.
    """
    marks = np.zeros(vocab_size, dtype=bool)
    marks[ids] = True
    offsets = (ids - np.arange(len(ids))).astype("<i8")
    return {
        "d2t": (TensorInfo("d2t", offsets.shape, "I64", "", offsets.nbytes), [offsets.tobytes()]),
        "t2d": (TensorInfo("t2d", marks.shape, "BOOL", "", marks.nbytes), [marks.tobytes()]),
    }


# -------------------------------------------------------------------------------------------- config


def config_for(head: Head, to: Format, target: Target | None) -> dict[str, Any]:
    """The new config.json, in which every field that matters is stated."""
    assert head.family is not None
    layers, norms, needed = _layer_fields(head), head.norms, head.aux_needed
    ids = head.aux_layer_ids or (target and default_aux_layers(target.num_layers))
    both = {
        "draft_vocab_size": head.draft_vocab_size,
        "target_hidden_size": head.target_hidden_size,
        **({AUX_KEY: list(ids)} if ids else {}),
        "mask_token_id": head.mask_token_id,
        **norms,
        **({SELECTOR: head.config[SELECTOR]} if head.config.get(SELECTOR) else {}),
    }
    if to == "vllm":
        if layers.get("layer_types") and layers["model_type"] == "qwen3":
            layers["use_sliding_window"] = "sliding_attention" in layers["layer_types"]
        depth = {"num_depths": head.trained_depth} if head.trained_depth else {}
        return {**layers, "architectures": [OF_FAMILY[head.family]], **both, **depth, "num_aux_hidden_states": needed}
    layers["model_type"] = head.family
    layers["architectures"] = ["Qwen3ForCausalLM" if head.family == "qwen3" else "LlamaForCausalLM"]
    # vLLM looks for these two among the layers' fields, the speculators library outside of them.
    layers |= {"fc_norm": True} if norms["fc_norm"] else {}
    layers |= {"num_aux_hidden_states": needed} if needed != 3 else {}
    return {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": "peagle",
        "speculators_config": _speculators_config(head, target),
        **both,
        "norm_output": False,
        **({"dtype": layers["dtype"]} if layers.get("dtype") else {}),
        "tie_word_embeddings": False,
        "transformer_layer_config": layers,
    }


def _layer_fields(head: Head) -> dict[str, Any]:
    """The decoder layers' fields, with what transformers would fill in; nothing of any format."""
    left_out = {*MASK_KEYS, *OF_A_FORMAT, *OWN_FIELDS, *ROPE_FIELDS, *WINDOW_FIELDS}
    served = {key: value for key, value in head.served.items() if key not in left_out and value is not None}
    model_type = str(served.setdefault("model_type", head.family))
    fields = {**DEFAULTS, "max_position_embeddings": DEFAULT_POSITIONS.get(model_type, 2048), **served}
    fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    fields["head_dim"] = head.head_dim
    fields["rope_parameters"] = rope_of_head(head)
    fields["rope_theta"] = fields["rope_parameters"]["rope_theta"]  # where transformers before 5 looks for it
    layer_types, window = windows(head)
    if window:
        fields |= {"layer_types": layer_types, "sliding_window": window}
        if model_type == "qwen3":
            fields |= {"use_sliding_window": True}  # else transformers ignores the window of a flat config
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


# --------------------------------------------------------------------------------------------- writing


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_safetensors(path: Path, tensors: Mapping[TensorInfo, Iterable[bytes]]) -> None:
    """Write tensors in one file.

    Args:
        tensors: name, shape, dtype and size of each, and its bytes, in pieces.
    """
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
        for info in ordered:
            file.writelines(tensors[info])
