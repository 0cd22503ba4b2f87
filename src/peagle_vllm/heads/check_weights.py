"""What is wrong with a head's weights: each tensor is there, with the shape and dtype that vLLM's layers give it.

Stock vLLM loads most of these heads all the same: a missing tensor keeps its random initial values, one without a place
may be dropped, and nothing but a low acceptance shows it.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from peagle_vllm.heads.files import FLOATS, is_finite, read_pieces
from peagle_vllm.heads.head import Head

if TYPE_CHECKING:
    import numpy as np

SOURCE_AGAIN = "take the head's weights from their source again"
MOST_LAYERS = 1000  # a config may name any number
Shape = tuple[int, ...]


def check_layers(head: Head) -> Iterator[str]:
    """Are all modules there?"""
    numbers = {name.split(".")[1] for name in head.tensors if name.startswith("layers.")}
    wanted = range(min(head.num_layers, MOST_LAYERS))
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


def _missing_parts(head: Head, layer: str) -> list[str]:
    parts = ["input_layernorm", "post_attention_layernorm", "self_attn.o_proj", "mlp.down_proj"]
    if not head.has(f"{layer}.self_attn.qkv_proj"):
        parts += [f"self_attn.{part}_proj" for part in "qkv"]
    if not head.has(f"{layer}.mlp.gate_up_proj"):
        parts += ["mlp.gate_proj", "mlp.up_proj"]
    if head.family == "qwen3":
        parts += ["self_attn.q_norm", "self_attn.k_norm"]
    return [f"{layer}.{part}" for part in parts if not head.has(f"{layer}.{part}")]


def check_fc(head: Head) -> Iterator[str]:
    """Does ``fc`` take as many aux hidden states, as wide, as vLLM builds it for?"""
    fc, count, width = head.tensors.get("fc.weight"), head.aux_needed, head.target_hidden_size
    needed = (head.hidden_size, head.num_aux * width)
    if fc is None or head.is_quantized or fc.shape == needed:
        return
    if fc.shape == (head.hidden_size, count * width):
        yield (
            f"fc takes {count} aux hidden states, vLLM would build it for {head.num_aux}: {head.layer_place}; "
            f'set "num_aux_hidden_states": {count} there'
        )
        return
    yield (
        f"fc.weight is {list(fc.shape)}, needs {list(needed)} (hidden size, {head.num_aux} aux layers x target hidden "
        f"size {width}): {head.file_of('fc.weight')}; correct the sizes in config.json, or use the head that was "
        "trained for this target"
    )


def check_mask_hidden(head: Head) -> Iterator[str]:
    file = head.file_of("mask_hidden")
    info = head.tensors.get("mask_hidden")
    if info is None:
        yield (
            f'mask_hidden is missing: {file}; {SOURCE_AGAIN}, or remove "parallel_drafting": true from the '
            "speculative config"
        )
        return
    width, count, hidden_size = math.prod(info.shape), head.aux_needed, head.target_hidden_size
    if width != count * hidden_size:
        yield (
            f"mask_hidden is {width} wide, needs {count} x {hidden_size} = {count * hidden_size} (aux layers x target "
            f"hidden size): {file}; use the head that was trained for this target, or correct the sizes in config.json"
        )
    elif info.dtype not in FLOATS:
        yield f"mask_hidden is stored as {info.dtype}, needs one of {', '.join(FLOATS)}: {file}; save it as F32"
    else:
        values = head.mask_hidden()
        fault = None if values is None else value_fault(values)
        if fault:
            yield f"{fault}: {file}; {SOURCE_AGAIN}, or train mask_hidden"


def value_fault(values: "np.ndarray") -> str | None:
    """What is wrong with the values of ``mask_hidden``."""
    import numpy as np

    if not np.isfinite(values).all():
        return "mask_hidden holds NaN or Inf"
    if not values.any():
        return "mask_hidden is all zeros, so every draft after the first would be garbage"
    return None


def check_norms(head: Head) -> Iterator[str]:
    """The two norms before ``fc``: vLLM drops or invents them when the config and the weights disagree."""
    for key, tensor, place in (
        ("norm_before_fc", "input_norm", head.config_file),
        ("fc_norm", "fc_norm", head.layer_place),
    ):
        if head.has(tensor) and not head.norms[key]:
            yield f'{tensor} is in the weights, vLLM sees no "{key}": {place}; add "{key}": true there'
        if head.norms[key] and not head.has(tensor):
            yield f"{key} is set, the weights hold no {tensor}: {head.file_of('fc.weight')}; {SOURCE_AGAIN}"


def expected_shapes(head: Head) -> dict[str, Shape]:
    """The shape of each tensor that the head may carry, by its name in vLLM. Needs a config without faults."""
    served, hidden, head_dim = head.served, head.hidden_size, head.head_dim
    heads = served["num_attention_heads"]
    q, kv = heads * head_dim, (served.get("num_key_value_heads") or heads) * head_dim
    inner, fc_in = served["intermediate_size"], head.num_aux * head.target_hidden_size
    shapes: dict[str, Shape] = {
        "embed_tokens.weight": (head.vocab_size, hidden),
        "fc.weight": (hidden, fc_in),
        "input_norm.weight": (fc_in,),
        "lm_head.weight": (head.draft_vocab_size, hidden),
        "norm.weight": (hidden,),
    }
    shapes |= {f"fc_norm.{i}.weight": (head.target_hidden_size,) for i in range(min(head.num_aux, MOST_LAYERS))}
    for i in range(min(head.num_layers, MOST_LAYERS)):
        layer, width = f"layers.{i}", hidden if i else 2 * hidden
        shapes |= {
            f"{layer}.hidden_norm.weight": (hidden,),
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (q, width),
            f"{layer}.self_attn.k_proj.weight": (kv, width),
            f"{layer}.self_attn.v_proj.weight": (kv, width),
            f"{layer}.self_attn.qkv_proj.weight": (q + 2 * kv, width),
            f"{layer}.self_attn.o_proj.weight": (hidden, q),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.gate_up_proj.weight": (2 * inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
        if head.family == "qwen3":
            shapes |= {f"{layer}.self_attn.{part}_norm.weight": (head_dim,) for part in "qk"}
        for part in _biased(head):
            shapes[f"{layer}.{part}.bias"] = shapes[f"{layer}.{part}.weight"][:1]
    return shapes


def _biased(head: Head) -> list[str]:
    """Projections that vLLM gives a bias."""
    biased = []
    if head.served.get("attention_bias"):
        biased += [f"self_attn.{part}_proj" for part in ("q", "k", "v", "qkv")]
        biased += ["self_attn.o_proj"] if head.family == "llama" else []
    if head.served.get("mlp_bias") and head.family == "llama":
        biased += [f"mlp.{part}_proj" for part in ("gate", "up", "gate_up", "down")]
    return biased


def check_shapes(head: Head) -> Iterator[str]:
    """One line for each kind of fault; it names the first tensor and counts the others."""
    expected, tensors = expected_shapes(head), head.tensors
    checked_elsewhere = ("d2t", "t2d", "mask_hidden")
    odd = sorted(name for name in tensors if name not in expected and name not in checked_elsewhere)
    odd = [name for name in odd if not name.endswith("rotary_emb.inv_freq")]
    if odd:
        yield (
            f"{tensors[odd[0]].name} is no tensor that vLLM's {head.family} P-EAGLE class has{_and_more(odd)}: "
            f"{head.file_of(odd[0])}; remove it, or correct config.json"
        )
    known = {name: info for name, info in sorted(tensors.items()) if name in expected}
    wrong = [name for name, info in known.items() if info.shape != expected[name] and name != "fc.weight"]
    # ``check_vocabulary`` names the field behind a wrong number of these rows.
    vocabularies = ("lm_head.weight", "embed_tokens.weight")
    wrong = [n for n in wrong if n not in vocabularies or known[n].shape[:1] == expected[n][:1]]
    if wrong:
        yield (
            f"{wrong[0]} is {list(known[wrong[0]].shape)}, needs {list(expected[wrong[0]])}{_and_more(wrong)}: "
            f"{head.file_of(wrong[0])}; correct the sizes in config.json, or take the weights from their source again"
        )
    no_float = [name for name, info in known.items() if info.dtype not in FLOATS]
    if no_float:
        yield (
            f"{no_float[0]} is stored as {known[no_float[0]].dtype}, needs one of {', '.join(FLOATS)}"
            f"{_and_more(no_float)}: {head.file_of(no_float[0])}; save it as BF16"
        )
    biases = (name for name in expected if name.endswith(".bias"))
    lost = sorted(name for name in biases if name not in tensors and f"{name[:-4]}weight" in tensors)
    if lost:
        yield (
            f"{lost[0]} is missing, and config.json promises biases{_and_more(lost)}: {head.file_of(lost[0])}; "
            "correct attention_bias and mlp_bias, or take the weights from their source again"
        )


def check_values(head: Head) -> Iterator[str]:
    """Reads every number once: one line that names the first tensor with NaN or Inf and counts the others.

    Not ``mask_hidden``, which ``check_mask_hidden`` reads.
    """
    folder = head.folder
    if folder is None:
        return
    broken = [
        name
        for name, info in sorted(head.tensors.items())
        if name != "mask_hidden" and not all(is_finite(raw, info.dtype) for raw in read_pieces(folder, info))
    ]
    if broken:
        named = head.tensors[broken[0]].name
        yield f"{named} holds NaN or Inf{_and_more(broken)}: {head.file_of(broken[0])}; {SOURCE_AGAIN}"


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
