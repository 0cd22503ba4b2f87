"""A bad head gets one line that names what is wrong, the file and field, and the remedy."""

from pathlib import Path

import pytest
import torch

from tests.heads import writers
from tests.heads.judging import AGAIN, AUX_KEY, Change, fc_norm, problems
from tests.heads.writers import HIDDEN, VOCAB, Written

MASK, UP, LM_HEAD = "mask_hidden", "layers.1.mlp.up_proj.weight", "lm_head.weight"
THIS_TARGET, SIZES = "use the head that was trained for this target", "correct the sizes in config.json"
LAYER_TYPES = ["full_attention", "sliding_attention"]


def put(name: str, make) -> Change:
    """``make``: of the tensor, what stands in its place."""
    return lambda head: head.tensors.update({name: make(head.tensors.get(name))})


def drop(*names: str) -> Change:
    return lambda head: [part.pop(name, None) for name in names for part in (head.tensors, head.config)]


def setting(**fields: object) -> Change:
    return lambda head: head.config.update(fields)


def layer_setting(**fields: object) -> Change:
    return lambda head: head.layer_config.update(fields)


def reduced(*changes: Change) -> Change:
    def both(head: Written) -> None:
        other = writers.speculators(draft_vocab=writers.DRAFT_VOCAB)
        head.config, head.tensors = other.config, other.tensors
        for change in changes:
            change(head)

    return both


def five_llama_aux(head: Written) -> None:
    other = writers.speculators(num_aux=5)
    head.config, head.tensors = other.config, other.tensors
    head.layer_config["num_aux_hidden_states"] = 3


# A draft vocabulary so small that a map of target ids would be one of offsets, too.
in_two_senses = reduced(
    drop("t2d"),
    setting(draft_vocab_size=8),
    put("d2t", lambda t: torch.arange(8) // 8 + torch.arange(8)),
    put(LM_HEAD, lambda t: t[:8].contiguous()),
)

# name -> (change to a sound speculators head, what the line says, the remedy)
REFUSED = {
    "no mask_hidden": (drop(MASK), "mask_hidden is missing: {}/model.safetensors", AGAIN),
    "zeros": (put(MASK, torch.zeros_like), "mask_hidden is all zeros", AGAIN),
    "NaN": (put(MASK, lambda t: t / 0), "mask_hidden holds NaN or Inf: {}/model.safetensors", AGAIN),
    "narrow": (
        put(MASK, lambda t: t[..., 1:].contiguous()),
        "mask_hidden is 47 wide, needs 3 x 16 = 48 (aux layers x target hidden size): {}/model.safetensors",
        THIS_TARGET,
    ),
    "fp8": (put(MASK, lambda t: t.to(torch.float8_e4m3fn)), "mask_hidden is stored as F8_E4M3", "save it as F32"),
    "no id": (drop("mask_token_id"), "no mask token id: {}/config.json", 'add "mask_token_id"'),
    "true id": (setting(mask_token_id=True), "mask_token_id is true, needs a whole number", "set it to the id"),
    "negative id": (setting(mask_token_id=-1), "mask_token_id is -1, outside the vocabulary of 64", "set it to the id"),
    "aux repeated": (setting(**{AUX_KEY: [2, 4, 4]}), "is [2, 4, 4] and names layer 4 twice", "name the 3 layers"),
    "aux too deep": (setting(**{AUX_KEY: [2, 4, 9]}), "names layer 9, some/target has 8 layers", THIS_TARGET),
    "fewer aux": (setting(**{AUX_KEY: [2, 4]}), "names 2 layers, fc takes 3 aux hidden states", "name the 3 layers"),
    "5 llama aux": (
        five_llama_aux,
        "fc takes 5 aux hidden states, vLLM would build it for 3: transformer_layer_config of {}/config.json",
        'set "num_aux_hidden_states": 5 there',
    ),
    "wide fc": (put("fc.weight", lambda t: torch.ones(16, 50)), "fc.weight is [16, 50], needs [16, 48]", THIS_TARGET),
    "no norm": (drop("norm.weight", UP), "norm is missing (and 1 more)", AGAIN),
    "a layer less": (layer_setting(num_hidden_layers=3), "num_hidden_layers is 3, the weights hold 2", "correct it"),
    "lost norm": (
        put("input_norm.weight", lambda _: torch.ones(3 * HIDDEN)),
        'input_norm is in the weights, but vLLM finds no "norm_before_fc"',
        "true there",
    ),
    "fc_norm nowhere named": (
        lambda head: (fc_norm(head), head.layer_config.pop("fc_norm")),
        'fc_norm is in the weights, but vLLM finds no "fc_norm": transformer_layer_config of {}/config.json',
        'add "fc_norm": true there',
    ),
    "lm_head rows": (
        put(LM_HEAD, lambda t: t[:50].contiguous()),
        "lm_head.weight has 50 rows, draft_vocab_size is 64: {}/model.safetensors",
        'correct "draft_vocab_size" in config.json',
    ),
    "draft vocabulary too large": (setting(draft_vocab_size=65), "draft_vocab_size is 65, more than the 64", "correct"),
    "no d2t": (reduced(drop("d2t")), "d2t is missing, and draft_vocab_size 48 is below vocab_size 64", AGAIN),
    "no lm_head": (reduced(drop(LM_HEAD)), "lm_head is missing, and the target's 64 rows do not fit", AGAIN),
    "d2t of floats": (reduced(put("d2t", lambda t: t.float())), "d2t is F32 [48], needs whole numbers", "correct"),
    "d2t of target ids": (
        reduced(put("d2t", lambda t: t + torch.arange(len(t)))),
        "d2t holds target ids, and vLLM adds it",
        "store it as offsets",
    ),
    "d2t outside": (
        reduced(put("d2t", lambda t: t + 1), drop("t2d")),
        "d2t sends 1 draft ids outside the vocabulary of 64 tokens: {}/model.safetensors",
        "store it as offsets",
    ),
    "d2t not one to one": (
        reduced(put("d2t", lambda t: -torch.arange(len(t))), drop("t2d")),
        "d2t sends two draft ids to one target id",
        "offsets",
    ),
    "d2t in two senses": (in_two_senses, "d2t could be offsets or target ids, and no t2d shows which", "store it as"),
    "a map nobody reads": (
        put("d2t", lambda _: torch.arange(VOCAB).flip(0)),
        "d2t maps tokens, and draft_vocab_size equals vocab_size (64), where vLLM uses no map",
        "remove d2t",
    ),
    "no aux states": (
        layer_setting(eagle_config={"use_aux_hidden_state": False}),
        "eagle_config.use_aux_hidden_state is off",
        "set it to true",
    ),
    "turned": (put(UP, lambda t: t.T.contiguous()), UP + " is [16, 24], needs [24, 16]: {}/model.safetensors", SIZES),
    "whole numbers": (put(UP, lambda t: t.long()), UP + " is stored as I64, needs one of F32, F16, BF16", "as BF16"),
    "a tensor too many": (
        put("layers.0.self_attn.sinks", lambda _: torch.ones(2)),
        "layers.0.self_attn.sinks is no tensor that vLLM's llama P-EAGLE class has",
        "remove it",
    ),
    "no biases": (
        layer_setting(attention_bias=True),
        "layers.0.self_attn.k_proj.bias is missing, and config.json promises biases (and 7 more)",
        "correct attention_bias",
    ),
    "odd heads": (layer_setting(num_attention_heads=3), "num_attention_heads is 3, not a multiple of", "correct them"),
    "few layer types": (layer_setting(layer_types=LAYER_TYPES[:1]), "layer_types names 1 layers", "correct it"),
    "no window": (layer_setting(layer_types=LAYER_TYPES), 'names sliding layers, and no "sliding_window"', "add it"),
    "another method": (
        setting(speculators_model_type="dflash"),
        'speculators_model_type "dflash" with model_type "llama" is no P-EAGLE class of vLLM',
        "name a P-EAGLE head",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_head_is_refused_in_one_line(name: str, tmp_path: Path):
    change, what, remedy = REFUSED[name]
    head = writers.speculators()
    change(head)
    faults = problems(head, tmp_path)
    line = faults[0].line
    assert what.format(tmp_path) in line
    assert remedy in line
    assert faults[0].severity == "error"
    places = (f"{tmp_path}/config.json", f"{tmp_path}/model.safetensors")
    assert any(place in line for place in places), "the line names no file"
    assert (len(faults) == 1) is (name != "another method"), faults  # which breaks more than one thing
