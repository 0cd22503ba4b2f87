"""A bad head gets one line that names what is wrong, the file, and a remedy."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.heads import writers
from tests.heads.judging import AUX_KEY, Change, fc_norm, layer_setting, norm_before_fc, problems, put, setting
from tests.heads.writers import VOCAB, Written

MASK, UP, LM_HEAD = "mask_hidden", "layers.1.mlp.up_proj.weight", "lm_head.weight"
LAYER_TYPES = ["full_attention", "sliding_attention"]


def drop(*names: str) -> Change:
    return lambda head: [part.pop(name, None) for name in names for part in (head.tensors, head.config)]


def linear_rope(**fields: object) -> Change:
    return layer_setting(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4, **fields})


def other(**spec: Any) -> Change:
    """Another speculators head in place of the first."""

    def replace(head: Written) -> None:
        written = writers.speculators(**spec)
        head.config, head.tensors = written.config, written.tensors

    return replace


def both(*changes: Change) -> Change:
    return lambda head: [change(head) for change in changes]


REDUCED = other(draft_vocab=writers.DRAFT_VOCAB)
# A draft vocabulary so small that a map of target ids would be one of offsets, too.
SMALL = both(REDUCED, setting(draft_vocab_size=8), put(LM_HEAD, lambda t: t[:8].contiguous()))

# What the line says -> the change to a sound speculators head
REFUSED: dict[str, Change] = {
    "mask_hidden is missing: {}/model.safetensors": drop(MASK),
    "mask_hidden is all zeros": put(MASK, torch.zeros_like),
    "mask_hidden holds NaN or Inf: {}/model.safetensors": put(MASK, lambda t: t / 0),
    "mask_hidden is 191 wide, needs 3 x 64 = 192 (aux layers x": put(MASK, lambda t: t[..., 1:].contiguous()),
    "mask_hidden is stored as F8_E4M3": put(MASK, lambda t: t.to(torch.float8_e4m3fn)),
    "no mask token id: {}/config.json": drop("mask_token_id"),
    "mask_token_id is true, needs a whole number": setting(mask_token_id=True),
    "mask_token_id is -1, outside the vocabulary of 512": setting(mask_token_id=-1),
    "is [2, 4, 4] and names layer 4 twice": setting(**{AUX_KEY: [2, 4, 4]}),
    "names layer 9, some/target has 8 layers": setting(**{AUX_KEY: [2, 4, 9]}),
    "names 2 layers, fc takes 3 aux hidden states": setting(**{AUX_KEY: [2, 4]}),
    "fc takes 5 aux hidden states, vLLM would build it for 3: transformer_layer_config of {}/config.json": both(
        other(num_aux=5), layer_setting(num_aux_hidden_states=3)
    ),
    "no aux layers are named, and vLLM's default [2, 4, 5] names 3 layers, fc takes 5 aux hidden states": both(
        other(family="qwen3", num_aux=5), drop(AUX_KEY), layer_setting(num_aux_layers=5)
    ),
    'set "num_aux_layers": 5 there': both(other(family="qwen3", num_aux=5), layer_setting(num_aux_layers=3)),
    "fc.weight is [64, 50], needs [64, 192]": put("fc.weight", lambda t: torch.ones(64, 50)),
    "norm is missing (and 1 more)": drop("norm.weight", UP),
    "num_hidden_layers is 3, the weights hold layers 0, 1": layer_setting(num_hidden_layers=3),
    'input_norm is in the weights, but vLLM finds no "norm_before_fc"': both(norm_before_fc, drop("norm_before_fc")),
    'fc_norm is in the weights, but vLLM finds no "fc_norm": transformer_layer_config of {}/config.json': both(
        fc_norm, lambda head: head.layer_config.pop("fc_norm")
    ),
    "lm_head.weight has 50 rows, draft_vocab_size is 512": put(LM_HEAD, lambda t: t[:50].contiguous()),
    "draft_vocab_size is 513, more than the 512": setting(draft_vocab_size=513),
    "d2t is missing, and draft_vocab_size 384 is below vocab_size 512": both(REDUCED, drop("d2t")),
    "lm_head is missing, and the target's 512 rows do not fit": both(REDUCED, drop(LM_HEAD)),
    "d2t is F32 [384], needs I64 or I32": both(REDUCED, put("d2t", lambda t: t.float())),
    "d2t holds target ids, and vLLM adds": both(REDUCED, put("d2t", lambda t: t + torch.arange(len(t)))),
    "d2t sends 384 draft ids outside the vocabulary of 512": both(REDUCED, put("d2t", lambda t: t + 512), drop("t2d")),
    "d2t sends two draft ids to one": both(REDUCED, put("d2t", lambda t: -torch.arange(len(t))), drop("t2d")),
    "d2t could be offsets or target ids, and no t2d shows which": both(
        SMALL, put("d2t", lambda t: torch.arange(8) // 8 + torch.arange(8)), drop("t2d")
    ),
    "d2t maps tokens, and draft_vocab_size equals": put("d2t", lambda _: torch.arange(VOCAB).flip(0)),
    "eagle_config.use_aux_hidden_state is off": layer_setting(eagle_config={"use_aux_hidden_state": False}),
    UP + " is [64, 96], needs [96, 64]: {}/model.safetensors": put(UP, lambda t: t.T.contiguous()),
    UP + " is stored as I64, needs one of F32, F16, BF16": put(UP, lambda t: t.long()),
    "sinks is no tensor that vLLM's llama": put("layers.0.self_attn.sinks", lambda _: torch.ones(2)),
    "k_proj.bias is missing, and config.json promises biases (and 7 more)": layer_setting(attention_bias=True),
    "num_attention_heads is 2, not a multiple of": layer_setting(num_key_value_heads=3),
    "layer_types names 1 layers": layer_setting(layer_types=LAYER_TYPES[:1]),
    'names sliding layers, and no "sliding_window"': layer_setting(layer_types=LAYER_TYPES),
    "rope_parameters.factor is 0.5, needs a number from 1 to 10,000": linear_rope(factor=0.5),
    "rope_parameters.rope_theta is 1, needs a number above 1": linear_rope(rope_theta=1),
    "..., needs a number from 0": linear_rope(mscale=10**400),
    '"torchao"}}, needs a JSON object whose': layer_setting(quantization_config={"quant_method": "torchao"}),
    "null}}, needs a JSON object whose quant_": layer_setting(quantization_config={"quant_method": None}),
    # This one breaks more than one thing.
    'speculators_model_type "dflash" with model_type "llama" is no': setting(speculators_model_type="dflash"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_bad_head_is_refused_in_one_line(what: str, tmp_path: Path):
    head = writers.speculators()
    REFUSED[what](head)
    faults = problems(head, tmp_path)
    line = faults[0].line
    assert what.format(tmp_path) in line
    places = "config.json", "model.safetensors"
    assert any(f"{tmp_path}/{place}; " in line for place in places), "the line names no file, or no remedy"
    assert faults[0].severity == "error"
    assert (len(faults) == 1) is ("dflash" not in what), faults
