"""What is wrong with a head's weights: each tensor is there, with the shape and dtype that vLLM's layers give it.

Stock vLLM loads most of these heads all the same: a missing tensor keeps its random initial numbers, one without a
place may be dropped, and nothing but a low acceptance shows it.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from peagle_vllm.heads.files import FLOATS, is_finite, read_pieces
from peagle_vllm.heads.head import AGAIN, Head, read_map

# The shape of each module's weight in a decoder layer, in the sizes of ``expected_shapes``.
LAYER: dict[str, tuple[str, ...]] = {
    "hidden_norm": ("hidden",),
    "input_layernorm": ("hidden",),
    "post_attention_layernorm": ("hidden",),
    "self_attn.q_proj": ("q", "input"),
    "self_attn.k_proj": ("kv", "input"),
    "self_attn.v_proj": ("kv", "input"),
    "self_attn.o_proj": ("hidden", "q"),
    "self_attn.q_norm": ("head",),
    "self_attn.k_norm": ("head",),
    "mlp.gate_proj": ("inner", "hidden"),
    "mlp.up_proj": ("inner", "hidden"),
    "mlp.down_proj": ("hidden", "inner"),
}
QWEN3_ONLY = ("self_attn.q_norm", "self_attn.k_norm")


def check_layers(head: Head) -> Iterator[str]:
    """Are all modules there?"""
    numbers = {name.split(".")[1] for name in head.tensors if name.startswith("layers.")}
    if len(numbers) != head.num_layers or numbers != {str(i) for i in range(len(numbers))}:
        what = f"num_hidden_layers is {head.num_layers}, the weights hold {len(numbers)} layers"
        yield f"{what}: {head.config_file}; correct it, or {AGAIN}"
        return
    optional = {"hidden_norm", *(() if head.family == "qwen3" else QWEN3_ONLY)}
    needed = ["fc", "norm", "layers.0.hidden_norm"]
    needed += [f"layers.{i}.{module}" for i in range(head.num_layers) for module in LAYER if module not in optional]
    yield from _first_of(head, {module: "is missing" for module in needed if not head.has(module)}, AGAIN)


def check_fc(head: Head) -> Iterator[str]:
    """Does ``fc`` take as many aux hidden states, as wide, as vLLM builds it for?"""
    fc, count, width = head.tensors.get("fc.weight"), head.aux_needed, head.target_hidden_size
    needed = (head.hidden_size, head.num_aux * width)
    if fc is None or head.is_quantized or fc.shape == needed:
        return
    if fc.shape == (head.hidden_size, count * width):
        what = f"fc takes {count} aux hidden states, vLLM would build it for {head.num_aux}"
        yield f'{what}: {head.layer_place}; set "num_aux_hidden_states": {count} there'
        return
    sizes = f"hidden size, {head.num_aux} aux layers x target hidden size {width}"
    remedy = "correct the sizes in config.json, or use the head that was trained for this target"
    yield f"fc.weight is {list(fc.shape)}, needs {list(needed)} ({sizes}): {head.file_of('fc.weight')}; {remedy}"


def check_mask_hidden(head: Head) -> Iterator[str]:
    file, info = head.file_of("mask_hidden"), head.tensors.get("mask_hidden")
    if info is None:
        remedy = f'{AGAIN}, or remove "parallel_drafting": true from the speculative config'
        yield f"mask_hidden is missing: {file}; {remedy}"
        return
    width, count, hidden_size = info.num_elements, head.aux_needed, head.target_hidden_size
    if width != count * hidden_size:
        needed = f"{count} x {hidden_size} = {count * hidden_size} (aux layers x target hidden size)"
        remedy = "use the head that was trained for this target, or correct the sizes in config.json"
        yield f"mask_hidden is {width} wide, needs {needed}: {file}; {remedy}"
    elif info.dtype not in FLOATS:
        yield f"mask_hidden is stored as {info.dtype}, needs one of {', '.join(FLOATS)}: {file}; save it as F32"
    else:
        vector = head.mask_hidden()
        fault = None if vector is None else value_fault(vector)
        if fault:
            yield f"{fault}: {file}; {AGAIN}, or train mask_hidden"


def value_fault(mask_hidden: np.ndarray) -> str | None:
    """What is wrong with the numbers in ``mask_hidden``."""
    if not np.isfinite(mask_hidden).all():
        return "mask_hidden holds NaN or Inf"
    return None if mask_hidden.any() else "mask_hidden is all zeros, so every draft after the first would be garbage"


def check_norms(head: Head) -> Iterator[str]:
    """The two norms before ``fc``: vLLM drops or invents them when the config and the weights disagree."""
    norms = (("norm_before_fc", "input_norm", head.config_file), ("fc_norm", "fc_norm", head.layer_place))
    for key, module, place in norms:
        if head.has(module) and not head.norms[key]:
            yield f'{module} is in the weights, but vLLM finds no "{key}": {place}; add "{key}": true there'
        if head.norms[key] and not head.has(module):
            yield f"{key} is set, the weights hold no {module}: {head.file_of('fc.weight')}; {AGAIN}"


def check_vocabulary(head: Head) -> Iterator[str]:
    """Do the sizes of the vocabularies fit each other and the weights, and is the map between them sound?"""
    draft, full = head.draft_vocab_size, head.vocab_size
    if draft > full:
        yield f"draft_vocab_size is {draft}, more than the {full} of vocab_size: {head.config_file}; correct them"
        return
    sizes = (("lm_head.weight", "draft_vocab_size", draft), ("embed_tokens.weight", "vocab_size", full))
    for tensor, key, rows in sizes:
        info = head.tensors.get(tensor)
        if info is not None and info.shape[:1] != (rows,):
            what = f"{tensor} has {info.shape[0] if info.shape else 0} rows, {key} is {rows}"
            yield f'{what}: {head.file_of(tensor)}; correct "{key}" in config.json'
    if head.is_reduced and not head.has("lm_head"):
        what = f"lm_head is missing, and the target's {full} rows do not fit a draft vocabulary of {draft}"
        yield f"{what}: {head.file_of('lm_head')}; {AGAIN}"
    if fault := read_map(head).fault:
        yield fault


def expected_shapes(head: Head) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that the head may carry, by its name in vLLM. Needs a config without faults."""
    served, hidden = head.served, head.hidden_size
    heads, inner = served["num_attention_heads"], served["intermediate_size"]
    q, kv = heads * head.head_dim, (served.get("num_key_value_heads") or heads) * head.head_dim
    sizes = {"hidden": hidden, "head": head.head_dim, "q": q, "kv": kv, "inner": inner}
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (head.vocab_size, hidden),
        "fc.weight": (hidden, head.num_aux * head.target_hidden_size),
        "input_norm.weight": (head.num_aux * head.target_hidden_size,),
        "lm_head.weight": (head.draft_vocab_size, hidden),
        "norm.weight": (hidden,),
    }
    norms = range(min(head.num_aux, len(head.tensors)))  # a config may name any number
    shapes |= {f"fc_norm.{i}.weight": (head.target_hidden_size,) for i in norms}
    for i in range(head.num_layers):
        sizes["input"] = hidden if i else 2 * hidden
        for module, dims in LAYER.items():
            if module in QWEN3_ONLY and head.family != "qwen3":
                continue
            shape = tuple(sizes[dim] for dim in dims)
            shapes[f"layers.{i}.{module}.weight"] = shape
            if _has_bias(head, module):
                shapes[f"layers.{i}.{module}.bias"] = shape[:1]
    return shapes


def _has_bias(head: Head, module: str) -> bool:
    """Whether vLLM gives this module a bias."""
    if not module.endswith("_proj"):
        return False
    if module.startswith("mlp."):
        return bool(head.served.get("mlp_bias")) and head.family == "llama"
    return bool(head.served.get("attention_bias")) and (head.family == "llama" or module != "self_attn.o_proj")


def check_shapes(head: Head) -> Iterator[str]:
    """One line for each kind of fault."""
    expected, tensors = expected_shapes(head), dict(sorted(head.tensors.items()))
    elsewhere = ("d2t", "t2d", "mask_hidden")  # have checks of their own
    odd, wrong, no_float = {}, {}, {}
    for name, info in tensors.items():
        if name in expected:
            # ``check_fc`` names the fault of ``fc``, ``check_vocabulary`` the field behind a wrong number of rows.
            rows_are_named = name in ("lm_head.weight", "embed_tokens.weight") and info.shape[:1] != expected[name][:1]
            if info.shape != expected[name] and name != "fc.weight" and not rows_are_named:
                wrong[name] = f"is {list(info.shape)}, needs {list(expected[name])}"
            if info.dtype not in FLOATS:
                no_float[name] = f"is stored as {info.dtype}, needs one of {', '.join(FLOATS)}"
        elif name not in elsewhere and not name.endswith("rotary_emb.inv_freq"):
            odd[name] = f"is no tensor that vLLM's {head.family} P-EAGLE class has"
    yield from _first_of(head, odd, "remove it, or correct config.json")
    yield from _first_of(head, wrong, f"correct the sizes in config.json, or {AGAIN}")
    yield from _first_of(head, no_float, "save it as BF16")
    biases = sorted(name for name in expected if name.endswith(".bias") and name not in tensors)
    lost = [name for name in biases if f"{name[:-4]}weight" in tensors]
    promised = dict.fromkeys(lost, "is missing, and config.json promises biases")
    yield from _first_of(head, promised, f"correct attention_bias and mlp_bias, or {AGAIN}")


def check_finite(head: Head) -> Iterator[str]:
    """Read every number once, and look for NaN and Inf. Not ``mask_hidden``, which ``check_mask_hidden`` reads."""
    return not_finite(head, [name for name in sorted(head.tensors) if name != "mask_hidden" and _has_nan(head, name)])


def not_finite(head: Head, names: Iterable[str]) -> Iterator[str]:
    """The line for tensors with NaN or Inf."""
    return _first_of(head, dict.fromkeys(names, "holds NaN or Inf"), AGAIN)


def _has_nan(head: Head, name: str) -> bool:
    info = head.tensors[name]
    return head.folder is not None and not all(is_finite(raw, info.dtype) for raw in read_pieces(head.folder, info))


def _first_of(head: Head, faults: Mapping[str, str], remedy: str) -> Iterator[str]:
    """A line with the fault of the first tensor or module, which counts the others; none without faults."""
    for name, what in list(faults.items())[:1]:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        in_file = head.tensors[name].name if name in head.tensors else name
        yield f"{in_file} {what}{more}: {head.file_of(name)}; {remedy}"
