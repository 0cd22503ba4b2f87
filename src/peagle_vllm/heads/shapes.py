"""Every tensor of a head has the shape and the kind of number that vLLM's layers give it, and no other is there.

Where ``num_attention_heads`` and its like are unfit (``fields``), shapes cannot be known and are left out.
"""

from collections.abc import Iterator

from peagle_vllm.heads.config import is_speculators
from peagle_vllm.heads.head import Head

FLOATS = ("F32", "F16", "BF16", "F64")
MAPS = ("d2t", "t2d")  # judged in ``vocabulary``
Shape = tuple[int, ...]


def expected_shapes(head: Head) -> dict[str, Shape]:
    """The shape of each tensor that the head may carry, by its name in vLLM."""
    served, hidden = head.served, head.hidden_size
    heads = served["num_attention_heads"]
    defaulted = served.get("model_type") == "qwen3" and not is_speculators(head.config)  # by transformers
    head_dim = served.get("head_dim") or (128 if defaulted else hidden // heads)
    q, kv = heads * head_dim, (served.get("num_key_value_heads") or heads) * head_dim
    inner, fc_in = served["intermediate_size"], head.num_aux * head.target_hidden_size
    shapes: dict[str, Shape] = {
        "embed_tokens.weight": (head.vocab_size, hidden),
        "fc.weight": (hidden, fc_in),
        "input_norm.weight": (fc_in,),
        "lm_head.weight": (head.draft_vocab_size, hidden),
        "norm.weight": (hidden,),
    }
    shapes |= {f"fc_norm.{i}.weight": (head.target_hidden_size,) for i in range(min(head.num_aux, 1000))}
    for i in range(min(head.num_layers, 1000)):
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
    expected = expected_shapes(head)
    odd = sorted(name for name in head.tensors if name not in expected and name not in (*MAPS, "mask_hidden"))
    odd = [name for name in odd if not name.endswith("rotary_emb.inv_freq")]
    if odd:
        yield (
            f"{head.tensors[odd[0]].name} is no tensor that vLLM's {head.family} P-EAGLE class has{_and_more(odd)}: "
            f"{head.file_of(odd[0])}; remove it, or correct config.json"
        )
    rows_judged = ("fc.weight", "lm_head.weight", "embed_tokens.weight")  # by the checks that know why
    wrong = sorted(
        name
        for name, info in head.tensors.items()
        if name in expected
        and info.shape != expected[name]
        and not (name in rows_judged and info.shape[:1] != expected[name][:1])
        and name != "fc.weight"
    )
    if wrong:
        yield (
            f"{wrong[0]} is {list(head.tensors[wrong[0]].shape)}, needs {list(expected[wrong[0]])}{_and_more(wrong)}: "
            f"{head.file_of(wrong[0])}; correct the sizes in config.json, or take the weights from their source again"
        )
    no_float = sorted(name for name in head.tensors if name in expected and head.tensors[name].dtype not in FLOATS)
    if no_float:
        yield (
            f"{no_float[0]} is stored as {head.tensors[no_float[0]].dtype}, needs one of {', '.join(FLOATS)}"
            f"{_and_more(no_float)}: {head.file_of(no_float[0])}; save it as BF16"
        )
    biases = {f"layers.{i}.{part}" for i in range(min(head.num_layers, 1000)) for part in _biased(head)}
    lost = sorted(n for n in biases if f"{n}.weight" in head.tensors and f"{n}.bias" not in head.tensors)
    if lost:
        yield (
            f"{lost[0]}.bias is missing, and config.json promises biases{_and_more(lost)}: {head.file_of(lost[0])}; "
            "correct attention_bias and mlp_bias, or take the weights from their source again"
        )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
