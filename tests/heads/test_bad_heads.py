"""A bad head, or pair, gets one line that names what is wrong, the file, and a remedy; sound ones get none."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle_vllm.heads.checks import check_pair
from peagle_vllm.heads.config import default_aux_layers
from peagle_vllm.heads.fields import vllm_fields
from peagle_vllm.heads.files import HeadError
from peagle_vllm.heads.head import read_head
from peagle_vllm.heads.target import Target, read_target
from tests.heads import writers
from tests.heads.judging import AUX_KEY, Change, fc_norm, layer_setting, norm_before_fc, only, problems, put, setting
from tests.heads.writers import HIDDEN, MASK_TOKEN, TARGET, VOCAB, Written

MASK, UP, LM_HEAD = "mask_hidden", "layers.1.mlp.up_proj.weight", "lm_head.weight"
LAYER_TYPES = ["full_attention", "sliding_attention"]
QKV = (("q", 64), ("k", 32), ("v", 32))


def drop(*names: str) -> Change:
    return lambda head: [part.pop(name, None) for name in names for part in (head.tensors, head.config)]


def linear_rope(**fields: object) -> Change:
    return layer_setting(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4, **fields})


def other(**spec: Any) -> Change:
    """Another speculators head in place of the first."""

    def exchange(head: Written) -> None:
        written = writers.speculators(**spec)
        head.config, head.tensors = written.config, written.tensors

    return exchange


def flat(head: Written) -> None:
    """In vLLM's own format, of another model type, without theta."""
    written = writers.vllm()
    head.config, head.tensors = written.config | {"model_type": "gpt_oss"}, written.tensors
    del head.config["rope_theta"]


def both(*changes: Change) -> Change:
    return lambda head: [change(head) for change in changes]


def prefixed(prefix: str) -> Change:
    def rename(head: Written) -> None:
        head.tensors = {prefix + name: tensor for name, tensor in head.tensors.items()}

    return rename


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
    "rope_theta is missing: {}/config.json": flat,
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
    '"torchao"}}, needs a JSON object whose': both(
        layer_setting(quantization_config={"quant_method": "torchao"}), put(UP, lambda t: t.to(torch.int8))
    ),
    'have "draft_model." before "layers": draft_model.layers.0.': prefixed("draft_model."),
    "o_proj.bias is missing, and config.json promises biases (and 1 more): {}/model.safetensors; add it as zeros": both(
        layer_setting(attention_bias=True),
        *(put(f"layers.{i}.self_attn.{n}_proj.bias", lambda _, w=w: torch.ones(w)) for i in (0, 1) for n, w in QKV),
    ),
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


@pytest.mark.parametrize("place", ["config", "layer_config"])
def test_a_quantized_head_has_no_problem(tmp_path: Path, place: str):
    head = writers.speculators()
    getattr(head, place)["quantization_config"] = {"quant_method": "compressed-tensors"}
    head.tensors = {n.replace("_proj.weight", "_proj.weight_packed"): t for n, t in head.tensors.items()}
    assert problems(head, tmp_path) == []


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"text_config": {"model_type": "llama", "vocab_size": 32064}, "model_type": "llava"}, (4096, 32064, 32)),
        ({"llm_config": {"hidden_size": 8, "vocab_size": 9, "num_hidden_layers": 7}, "auto_map": {}}, (8, 9, 7)),
    ],
    ids=["LLaVA, whose sizes are its classes' defaults", "InternVL, whose code is its own"],
)
def test_a_target_with_a_text_model_inside(config: dict[str, Any], sizes: tuple[int, ...], tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = read_target(str(tmp_path))
    assert (target.hidden_size, target.vocab_size, target.num_layers) == sizes


def test_k_beyond_the_trained_depth_is_warned_of(tmp_path: Path):
    head = writers.speculators()
    assert problems(head, tmp_path, k=8) == []
    line = only(problems(head, tmp_path, k=9), "warning")
    assert "was trained 8 deep" in line and line.endswith("set it to 8 or less")
    del head.config["speculators_config"]["proposal_methods"]
    assert problems(head, tmp_path, k=9) == []


def test_an_architecture_is_named_as_the_file_has_it(tmp_path: Path):
    head = writers.vllm()
    head.config["architectures"] = ["GptOssForCausalLM"]
    line = problems(head, tmp_path)[0].line
    assert line.startswith('architecture "GptOssForCausalLM" is no P-EAGLE') and "LlamaForCausalLMEagle3" in line


def test_specforge_states_fields_beside_the_config(tmp_path: Path):
    stated = {"mask_token_id": MASK_TOKEN, "norm_before_residual": True, "num_depths": 6, "num_draft_layers": 9}
    folder = writers.specforge(num_depths=4, mask_token_id=None).save(tmp_path)
    (folder / "peagle_config.json").write_text(json.dumps(stated))
    head = read_head(folder)
    assert check_pair(head, TARGET) == [] and head.norms["norm_before_residual"]
    assert (head.mask_token_id, head.trained_depth, head.num_layers) == (MASK_TOKEN, 4, 2)


def test_what_a_config_says_of_the_target_alone_is_left_out(tmp_path: Path):
    """NeMo copies the target's config, its quantization with it; a head of bfloat16 has none."""
    head = writers.nemo()
    head.config["quantization_config"] = {"quant_method": "mxfp4"}
    assert problems(head, tmp_path) == [] and vllm_fields(read_head(tmp_path))["quantization_config"] is None


def test_what_serving_would_leave_out_silently_is_warned_of(tmp_path: Path):
    head = writers.speculators()
    head.config["aux_hidden_state_layer_ids"] = head.config.pop(AUX_KEY)
    line = only(problems(head, tmp_path / "aux"), "warning")
    assert "aux_hidden_state_layer_ids is [2, 4, 5], which vLLM does not read" in line
    head = writers.speculators()
    head.config["embed_requires_grad"] = True
    assert problems(head, tmp_path / "whole") == []
    del head.tensors["embed_tokens.weight"]
    assert "embed_tokens is missing, and embed_requires_grad" in only(problems(head, tmp_path / "bare"), "warning")


def test_a_broken_copy_of_shards(tmp_path: Path):
    head = writers.speculators()
    head.shards = 2
    folder = head.save(tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    assert read_head(folder).tensors
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(HeadError, match="is there, without 1 more of its kind; download"):
        read_head(folder)


def test_an_eagle3_head_is_refused_by_that_name(tmp_path: Path):
    head = writers.vllm()
    del head.config["mask_token_id"], head.tensors["mask_hidden"]
    line = only(problems(head, tmp_path))
    assert "is no P-EAGLE head (an EAGLE-3 head, perhaps)" in line
    assert 'remove "parallel_drafting": true from the speculative config, or name a P-EAGLE head' in line


@pytest.mark.parametrize(
    ("target", "what"),
    [
        (replace(TARGET, hidden_size=32), "hidden_size is 64, some/target has hidden states 32 wide"),
        (replace(TARGET, vocab_size=511), "vocab_size is 512, some/target has 511"),
    ],
)
def test_a_foreign_target_is_refused_in_one_line(target: Target, what: str, tmp_path: Path):
    line = only(problems(writers.speculators(), tmp_path, target))
    assert what in line
    assert f"{tmp_path}/config.json; " in line


def larger_target(folder: Path, ordinary: int, mask: str = "") -> Target:
    """Of 518 tokens: the first ``ordinary`` make text, two more were added. ``mask``: what the chat template holds."""
    folder.mkdir()
    vocab = {f"word {i}": i for i in range(ordinary) if i != MASK_TOKEN}
    added = [{"id": i, "content": "<mask>" if i == MASK_TOKEN else f"<{i}>"} for i in (MASK_TOKEN, 516, 517)]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": mask}))
    return replace(TARGET, name=str(folder), vocab_size=518)


def test_a_larger_target_is_served_where_its_first_tokens_are_the_heads(tmp_path: Path):
    head, target = writers.speculators(), tmp_path / "target"
    assert problems(head, tmp_path / "head", larger_target(target, VOCAB)) == []
    foreign = larger_target(tmp_path / "other", VOCAB + 1)
    reserved = larger_target(tmp_path / "masked", VOCAB, "<mask>")
    what = f"vocab_size is 512, {foreign.name} has 518, and token 512 of {foreign.name}, 'word 512', was not added to"
    assert what in only(problems(head, tmp_path / "head", foreign))
    line = only(problems(head, tmp_path / "head", reserved))
    assert f"the text of {reserved.name} uses the head's mask token {MASK_TOKEN}, '<mask>'" in line
    assert line.endswith("/config.json; use the head that was trained for this target")
    served = replace(foreign, tokenizer=str(target))
    assert problems(head, tmp_path / "head", served) == [], "the tokenizer that is served decides"
    unknown = replace(TARGET, vocab_size=518)
    line = only(problems(head, tmp_path / "head", unknown), "warning")
    assert "no tokenizer.json shows whether those beyond were added to the head's" in line


@pytest.mark.parametrize(
    ("num_layers", "fault"),
    [(2, "names layer -1, some/target has 2 layers"), (4, "names layer 2 twice"), (6, "names layer 3 twice")],
)
def test_default_layers_of_a_shallow_target(num_layers: int, fault: str, tmp_path: Path):
    assert problems(writers.aws(), tmp_path, replace(TARGET, num_layers=7)) == []
    line = only(problems(writers.aws(), tmp_path, replace(TARGET, num_layers=num_layers)))
    assert f"no aux layers are named, and vLLM's default {list(default_aux_layers(num_layers))} {fault}" in line
    assert 'set "eagle_aux_hidden_state_layer_ids" to the 3 layers that the head was trained on' in line


def test_a_head_of_another_width_needs_its_own_embeddings(tmp_path: Path):
    head = writers.speculators()
    head.config["target_hidden_size"] = 32
    head.tensors |= {"fc.weight": torch.ones(HIDDEN, 96), "mask_hidden": torch.ones(1, 1, 96)}
    wide = replace(TARGET, hidden_size=32)
    assert problems(head, tmp_path, wide) == []
    for name in ("embed_tokens", "lm_head"):
        kept = head.tensors.pop(f"{name}.weight")
        assert f"{name} is missing, and that of some/target is 32 wide" in only(problems(head, tmp_path, wide))
        head.tensors[f"{name}.weight"] = kept


def test_layers_out_of_order_or_counted_by_their_outputs_are_a_warning(tmp_path: Path):
    """SpecForge's own default for eight layers is what vLLM calls (2, 4, 5)."""
    head = writers.speculators()
    for ids, says in (([5, 2, 4], "ascending order"), ([1, 3, 4], "[1, 3, 4], one less than vLLM's default [2, 4, 5]")):
        head.config[AUX_KEY] = ids
        assert says in only(problems(head, tmp_path), "warning")


def test_without_weights_the_config_is_still_checked(tmp_path: Path):
    head = writers.speculators()
    for token, count in ((MASK_TOKEN, 0), (VOCAB, 1)):
        head.config["mask_token_id"] = token
        (head.save(tmp_path) / "model.safetensors").unlink()
        problems = check_pair(read_head(tmp_path), TARGET, num_speculative_tokens=5)
        assert len(problems) == count
