"""Bad pairs get one line that names what is wrong, where, and the remedy; sound pairs get none."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peagle_vllm.heads.checks import check_pair
from peagle_vllm.heads.config import default_aux_layers
from peagle_vllm.heads.head import read_head
from peagle_vllm.heads.target import Target, read_target
from tests.heads import writers
from tests.heads.judging import AUX_KEY, only, problems
from tests.heads.writers import HIDDEN, MASK_TOKEN, TARGET, VOCAB


@pytest.mark.parametrize("place", ["config", "layer_config"])
def test_a_quantized_head_has_no_problem(tmp_path: Path, place: str):
    head = writers.speculators()
    getattr(head, place)["quantization_config"] = {"quant_method": "compressed-tensors"}
    head.tensors = {n.replace("_proj.weight", "_proj.weight_packed"): t for n, t in head.tensors.items()}
    assert problems(head, tmp_path) == []


def test_a_target_whose_sizes_are_its_classes_defaults(tmp_path: Path):
    """As LLaVA's config.json has it."""
    text = {"model_type": "llama", "vocab_size": 32064}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text}))
    target = read_target(str(tmp_path))
    assert (target.hidden_size, target.vocab_size, target.num_layers) == (4096, 32064, 32)


def test_k_beyond_the_trained_depth_is_warned_of(tmp_path: Path):
    head = writers.speculators()
    assert problems(head, tmp_path, k=8) == []
    line = only(problems(head, tmp_path, k=9), "warning")
    assert "was trained 8 deep" in line and line.endswith("set it to 8 or less")
    del head.config["speculators_config"]["proposal_methods"]
    assert problems(head, tmp_path, k=9) == []


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
        (replace(TARGET, num_layers=4), "names layer 5, some/target has 4 layers"),
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
    del head.tensors["embed_tokens.weight"]
    assert "embed_tokens is missing, and that of some/target is 32 wide" in only(problems(head, tmp_path, wide))


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
