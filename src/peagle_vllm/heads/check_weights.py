"""What is wrong with a head's weights: each tensor is there, with the shape and dtype that vLLM's layers give it.

Stock vLLM loads most of these heads all the same: a missing tensor keeps its random initial numbers, one without a
place may be dropped, and nothing but a low acceptance shows it.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

from peagle_vllm.heads.files import FLOATS, is_finite, read_tensor
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
FIT_SIZES = "use the head that was trained for this target, or correct the sizes in config.json"


def check_layers(head: Head) -> Iterator[str]:
    """Are all modules there?"""
    inner = next((name for name in head.tensors if ".layers.0." in name), "")
    if inner and not any(name.startswith("layers.") for name in head.tensors):
        prefix, name = inner.partition("layers.0.")[0], head.tensors[inner].name
        yield f'names of tensors have "{prefix}" before "layers": {name} in {head.file_of(inner)}; save them without it'
        return
    numbers = {name.split(".")[1] for name in head.tensors if name.startswith("layers.")}
    if len(numbers) != head.num_layers or numbers != {str(i) for i in range(len(numbers))}:
        what = f"num_hidden_layers is {head.num_layers}, the weights hold layers {', '.join(sorted(numbers)) or 'none'}"
        yield f"{what}: {head.config_file}; correct it, or {AGAIN}"
        return
    needed = ["fc", "norm", *(name for i in range(head.num_layers) for name in _modules(head, i))]
    needed = [name for name in needed if not name.endswith("hidden_norm") or name == "layers.0.hidden_norm"]
    yield from _first_of(head, {module: "is missing" for module in needed if not head.has(module)}, AGAIN)


def _modules(head: Head, layer: int) -> dict[str, tuple[str, ...]]:
    """Those of LAYER that a decoder layer of the head has, by their whole names."""
    left_out = () if head.family == "qwen3" else QWEN3_ONLY
    return {f"layers.{layer}.{module}": sizes for module, sizes in LAYER.items() if module not in left_out}


def check_fc(head: Head) -> Iterator[str]:
    """Does ``fc`` take as many aux hidden states, as wide, as vLLM builds it for?"""
    fc, width = head.tensors.get("fc.weight"), head.target_hidden_size
    needed = (head.hidden_size, head.num_aux * width)
    if fc is None or head.is_quantized or fc.shape == needed:
        return
    if fc.shape == (head.hidden_size, head.aux_needed * width):
        what = f"fc takes {head.aux_needed} aux hidden states, vLLM would build it for {head.num_aux}"
        has_own = head.family == "qwen3" and "num_aux_layers" in head.served
        key = "num_aux_layers" if has_own else "num_aux_hidden_states"
        yield f'{what}: {head.layer_place}; set "{key}": {head.aux_needed} there'
    else:
        what = f"fc.weight is {list(fc.shape)}, needs {list(needed)} ({head.num_aux} aux layers {width} wide)"
        yield f"{what}: {head.file_of('fc.weight')}; {FIT_SIZES}"


def check_mask_hidden(head: Head) -> Iterator[str]:
    file, info = head.file_of("mask_hidden"), head.tensors.get("mask_hidden")
    if info is None:
        yield f"mask_hidden is missing: {file}; {AGAIN}"
        return
    width = head.aux_needed * head.target_hidden_size
    if info.num_elements != width:
        needed = f"{head.aux_needed} x {head.target_hidden_size} = {width} (aux layers x target hidden size)"
        yield f"mask_hidden is {info.num_elements} wide, needs {needed}: {file}; {FIT_SIZES}"
    elif info.dtype not in FLOATS:
        yield f"mask_hidden is stored as {info.dtype}, needs one of {', '.join(FLOATS)}: {file}; save it as F32"
    elif (vector := head.array("mask_hidden")) is not None and (fault := value_fault(vector)):
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
    sizes = {"lm_head.weight": ("draft_vocab_size", draft), "embed_tokens.weight": ("vocab_size", full)}
    for tensor, (key, rows) in sizes.items():
        info = head.tensors.get(tensor)
        if info is not None and info.shape[:1] != (rows,):
            what = f"{tensor} has {info.shape[0] if info.shape else 0} rows, {key} is {rows}"
            yield f'{what}: {head.file_of(tensor)}; correct "{key}" in config.json, or cut padding'
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
    # Qwen3's class has biases in q, k and v alone.
    biased = ("q_proj", "k_proj", "v_proj") if head.family == "qwen3" else ("_proj",)
    for i in range(head.num_layers):
        sizes["input"] = hidden if i else 2 * hidden
        for module, dims in _modules(head, i).items():
            shape = tuple(sizes[dim] for dim in dims)
            shapes[f"{module}.weight"] = shape
            key = "mlp_bias" if ".mlp." in module else "attention_bias"
            if module.endswith(biased) and served.get(key):
                shapes[f"{module}.bias"] = shape[:1]
    return shapes


def check_shapes(head: Head) -> Iterator[str]:
    """One line for each remedy."""
    expected = expected_shapes(head)
    faults: dict[str, dict[str, str]] = defaultdict(dict)
    for name, info in head.weights.items():
        if name in expected:
            # ``check_fc`` names the fault of ``fc``, ``check_vocabulary`` the field behind a wrong number of rows.
            rows_are_named = name in ("lm_head.weight", "embed_tokens.weight") and info.shape[:1] != expected[name][:1]
            if info.shape != expected[name] and name != "fc.weight" and not rows_are_named:
                what = f"is {list(info.shape)}, needs {list(expected[name])}"
                faults[f"correct the sizes in config.json, or {AGAIN}"][name] = what
            if info.dtype not in FLOATS:
                faults["save it as BF16"][name] = f"is stored as {info.dtype}, needs one of {', '.join(FLOATS)}"
        elif name != "mask_hidden":
            what = f"is no tensor that vLLM's {head.family} P-EAGLE class has"
            faults["remove it, or correct config.json"][name] = what
    for name in sorted(expected.keys() - head.tensors.keys()):
        if name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in head.tensors:
            what = "is missing, and config.json promises biases"
            has_others = name.endswith("o_proj.bias") and name.replace("o_proj", "q_proj") in head.tensors
            remedy = "add it as zeros" if has_others else f"correct attention_bias and mlp_bias, or {AGAIN}"
            faults[remedy][name] = what
    for remedy, tensors in faults.items():
        yield from _first_of(head, tensors, remedy)


def check_finite(head: Head) -> Iterator[str]:
    """Read every number once, and look for NaN and Inf. Not ``mask_hidden``, which ``check_mask_hidden`` reads."""
    names = [
        name
        for name, info in sorted(head.tensors.items())
        if head.folder and name != "mask_hidden" and not is_finite(read_tensor(head.folder, info), info.dtype)
    ]
    return _first_of(head, dict.fromkeys(names, "holds NaN or Inf"), AGAIN)


def _first_of(head: Head, faults: Mapping[str, str], remedy: str) -> Iterator[str]:
    """A line with the fault of the first tensor or module, which counts the others; none without faults."""
    for name, what in list(faults.items())[:1]:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        in_file = head.tensors[name].name if name in head.tensors else name
        yield f"{in_file} {what}{more}: {head.file_of(name)}; {remedy}"
