"""What is wrong with a head alone. ``heads.pair`` adds what is wrong with it for a target.

Most of these heads load in stock vLLM: a tensor that is missing stays at its random initial value there, one without a
place may be dropped, and nothing but acceptance tells. So every tensor's presence and shape is checked here.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from peagle_vllm.heads.config import LLAMA_ARCHITECTURES, QWEN3_ARCHITECTURES, is_speculators, is_whole
from peagle_vllm.heads.fields import check_fields, layer_place
from peagle_vllm.heads.files import HeadError, shown
from peagle_vllm.heads.head import Head, Problem
from peagle_vllm.heads.shapes import FLOATS, check_shapes
from peagle_vllm.heads.vocabulary import TARGET_IDS, check_vocabulary

if TYPE_CHECKING:
    import numpy as np

SOURCE_AGAIN = "take the head's weights from their source again"


def check_head(head: Head) -> list[Problem]:
    """Problems of a P-EAGLE head, the most telling first; empty for a sound one."""
    if head.tensors and not head.has_mask_hidden and head.mask_token_id is None:
        return [
            Problem(
                f"{head.name} is no P-EAGLE head (an EAGLE-3 head, perhaps): it has neither mask_hidden nor a mask "
                'token id; remove "parallel_drafting": true from the speculative config, or name a P-EAGLE head'
            )
        ]
    checks = (_architecture, _mask_token, check_fields, _layers, _fc, _mask_hidden, _norms, check_vocabulary, _shapes)
    lines = [line for check in checks for line in check(head)]
    return [Problem(line, by_convert=line.startswith(TARGET_IDS)) for line in lines]


def aux_needed(head: Head) -> int:
    """Aux hidden states that ``fc`` takes, by its shape where that is telling, else as vLLM counts them."""
    fc = head.tensors.get("fc.weight")
    if fc is None or _is_quantized(head) or len(fc.shape) != 2 or not fc.shape[1]:
        return head.num_aux
    count, rest = divmod(fc.shape[1], head.target_hidden_size)
    return head.num_aux if rest else count


def width_fault(width: int, count: int, hidden_size: int) -> str | None:
    """What is wrong with the width of ``mask_hidden`` for ``count`` aux layers."""
    needed = count * hidden_size
    if width == needed:
        return None
    return f"mask_hidden is {width} wide, needs {count} x {hidden_size} = {needed} (aux layers x target hidden size)"


def value_fault(values: "np.ndarray") -> str | None:
    """What is wrong with the values of ``mask_hidden``."""
    import numpy as np

    if not np.isfinite(values).all():
        return "mask_hidden holds NaN or Inf"
    if not values.any():
        return "mask_hidden is all zeros, so every draft after the first would be garbage"
    return None


def _architecture(head: Head) -> Iterator[str]:
    if head.family is None:
        known = ", ".join(sorted(LLAMA_ARCHITECTURES | QWEN3_ARCHITECTURES))
        if is_speculators(head.config):
            kind, nested = head.config.get("speculators_model_type"), head.served.get("model_type", "llama")
            yield (
                f"speculators_model_type {shown(kind)} with model_type {shown(nested)} is no P-EAGLE class of vLLM, "
                f'needs "peagle" with "llama" or "qwen3": {head.config_file}; name a P-EAGLE head'
            )
        else:
            yield (
                f"architecture {shown(head.architecture)} is no P-EAGLE class of vLLM: {head.config_file}; set "
                f'"architectures" to one of {known}'
            )
    eagle = head.served.get("eagle_config") or {}
    if not eagle.get("use_aux_hidden_state", True):
        yield f"eagle_config.use_aux_hidden_state is off, P-EAGLE needs it: {head.config_file}; set it to true"


def _mask_token(head: Head) -> Iterator[str]:
    token, key, file = head.mask_token_id, head.mask_token_key, head.config_file
    if token is None:
        beside = ' beside "speculators_model_type": "peagle"' if is_speculators(head.config) else ""
        what = f"no mask token id ({key} is null)" if key else "no mask token id"
        yield (
            f'{what}: {file}; add "mask_token_id" with the id that the head was trained with{beside}, or give it to '
            "peagle-vllm convert --mask-token-id"
        )
    elif not isinstance(token, int) or not is_whole(token):
        yield f"{key} is {shown(token)}, needs a whole number: {file}; set it to the id the head was trained with"
    elif not 0 <= token < head.vocab_size:
        yield (
            f"{key} is {shown(token)}, outside the vocabulary of {head.vocab_size} tokens: {file}; set it to the id "
            "the head was trained with"
        )


def _mask_hidden(head: Head) -> Iterator[str]:
    file = head.file_of("mask_hidden")
    if not head.tensors:
        return
    if not head.has_mask_hidden:
        yield (
            f'mask_hidden is missing: {file}; {SOURCE_AGAIN}, or remove "parallel_drafting": true from the '
            "speculative config"
        )
        return
    width = math.prod(head.tensors["mask_hidden"].shape)
    fault = width_fault(width, aux_needed(head), head.target_hidden_size)
    if fault:
        yield f"{fault}: {file}; use the head that was trained for this target, or correct the sizes in config.json"
        return
    dtype = head.tensors["mask_hidden"].dtype
    if dtype not in FLOATS:
        yield f"mask_hidden is stored as {dtype}, needs one of {', '.join(FLOATS)}: {file}; save it as F32"
        return
    try:
        values = head.mask_hidden()
    except HeadError as error:
        yield str(error)
        return
    fault = None if values is None else value_fault(values)
    if fault:
        yield f"{fault}: {file}; {SOURCE_AGAIN}, or train mask_hidden"


def _layers(head: Head) -> Iterator[str]:
    if not head.tensors:
        return
    numbers = {name.split(".")[1] for name in head.tensors if name.startswith("layers.")}
    wanted = range(head.num_layers) if head.num_layers <= 1000 else range(1000)
    if numbers != {str(i) for i in wanted}:
        yield (
            f"num_hidden_layers is {head.num_layers}, the weights hold {len(numbers)} layers: {head.config_file}; "
            "correct it, or take the head from its source again"
        )
        return
    missing = [name for i in wanted for name in _missing_parts(head, f"layers.{i}")]
    missing += [part for part in ("fc", "norm", "layers.0.hidden_norm") if not head.has(part)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        yield f"{missing[0]} is missing{more}: {head.file_of('fc.weight')}; {SOURCE_AGAIN}"


def _missing_parts(head: Head, layer: str) -> Iterator[str]:
    fused = {"self_attn.qkv_proj": "qkv", "mlp.gate_up_proj": ("gate", "up")}
    parts = ["input_layernorm", "post_attention_layernorm", "self_attn.o_proj", "mlp.down_proj"]
    for whole, pieces in fused.items():
        if not head.has(f"{layer}.{whole}"):
            parts += [f"{whole.split('.')[0]}.{piece}_proj" for piece in pieces]
    if head.family == "qwen3":
        parts += ["self_attn.q_norm", "self_attn.k_norm"]
    return (f"{layer}.{part}" for part in parts if not head.has(f"{layer}.{part}"))


def _fc(head: Head) -> Iterator[str]:
    fc = head.tensors.get("fc.weight")
    if fc is None or _is_quantized(head):
        return
    builds = (head.hidden_size, head.num_aux * head.target_hidden_size)
    count = aux_needed(head)
    if fc.shape == builds:
        return
    if fc.shape == (head.hidden_size, count * head.target_hidden_size):
        yield (
            f"fc takes {count} aux hidden states, vLLM would build it for {head.num_aux}: {layer_place(head)}; "
            f'set "num_aux_hidden_states": {count} there'
        )
        return
    yield (
        f"fc.weight is {list(fc.shape)}, needs {list(builds)} (hidden size, {head.num_aux} aux layers x target hidden "
        f"size {head.target_hidden_size}): {head.file_of('fc.weight')}; correct the sizes in config.json, or use the "
        "head that was trained for this target"
    )


def _norms(head: Head) -> Iterator[str]:
    """The two norms before ``fc``: vLLM drops or invents them when the config and the weights disagree."""
    if not head.tensors:
        return
    eagle = head.served.get("eagle_config") or {}
    before_fc = bool(eagle.get("norm_before_fc", head.served.get("norm_before_fc", False)))
    place = head.config_file
    for key, tensor, wanted in (
        ("norm_before_fc", "input_norm", before_fc),
        ("fc_norm", "fc_norm", bool(head.served.get("fc_norm", False))),
    ):
        has = head.has(tensor)
        if has and not wanted:
            inner = "transformer_layer_config of " if key == "fc_norm" and is_speculators(head.config) else ""
            yield f'{tensor} is in the weights, vLLM sees no "{key}": {inner}{place}; add "{key}": true there'
        if wanted and not has:
            yield f"{key} is set, the weights hold no {tensor}: {head.file_of('fc.weight')}; {SOURCE_AGAIN}"


def _shapes(head: Head) -> Iterator[str]:
    if head.family is None or _is_quantized(head) or any(True for _ in check_fields(head)):
        return
    if any(True for _ in _layers(head)):
        return
    yield from check_shapes(head)


def _is_quantized(head: Head) -> bool:
    return bool(head.served.get("quantization_config") or head.served.get("compression_config"))
