"""What a head begins as."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from transformers import LlamaForCausalLM

from peagle_tools.shared.errors import ToolError
from peagle_tools.train.peagle_yaml import read_config
from tests.train.runs import VOCAB, new_trainer, toy_run


def begin(file: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """The head that a run begins with, and a batch of it."""
    trainer = new_trainer(file)
    torch.manual_seed(0)
    return trainer.model, next(iter(trainer.train_loader))


def loss_of(head: Any, batch: dict[str, torch.Tensor], **options: Any) -> float:
    torch.manual_seed(0)
    with torch.no_grad():
        return float(head(**batch, **options, loss_config=resolve_loss_config("ce", "eager"))[1])


def test_a_head_goes_on_with_more_layers_and_drafts_the_same(tmp_path: Path) -> None:
    first, batch = begin(toy_run(tmp_path / "first"))
    first.save_pretrained(tmp_path / "head")
    init = str(tmp_path / "head")
    file = tmp_path / "head/config.json"  # names no layers, as `convert` without a target writes it: the usual ones
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eagle_aux_hidden_state_layer_ids": None}))
    head, _ = begin(toy_run(tmp_path / "more", head={"layers": 4, "init": init}))
    assert len(head.layers) == 4
    assert loss_of(head, batch, num_depths=3) == pytest.approx(loss_of(first, batch, num_depths=3), rel=1e-6)
    first.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert not (tmp_path / "sharded/model.safetensors").exists()
    head, _ = begin(toy_run(tmp_path / "shards", head={"init": str(tmp_path / "sharded")}))
    assert loss_of(head, batch, num_depths=3) == loss_of(first, batch, num_depths=3)
    with pytest.raises(ToolError, match=r"head.layers: is 1, but the head of head.init \(.*/head\) has 2; write 2$"):
        begin(toy_run(tmp_path / "fewer", head={"layers": 1, "init": init}))
    with pytest.raises(ToolError, match=r"head.aux_layers: is \[1, 2, 3\], but .* has \[2, 4, 5\]; write \[2, 4, 5\]$"):
        begin(toy_run(tmp_path / "other", head={"aux_layers": [1, 2, 3], "init": init}))
    first.config.transformer_layer_config.layer_types = ["full_attention", "sliding_attention"]
    first.save_pretrained(tmp_path / "head")
    with pytest.raises(ToolError, match=r"^head: its layers have a sliding window, and none is trained so; begin wi"):
        begin(toy_run(tmp_path / "windowed", head={"init": init}))


def test_it_learns_of_a_target_whose_last_norm_scales_by_one_more(tmp_path: Path) -> None:
    """As Gemma's and Qwen3-Next's do."""
    file = toy_run(tmp_path / "run", head={"layers": 1, "init": "target"})
    config = tmp_path / "run/target/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "qwen3_next"}))
    head, states = begin(file)[0], torch.randn(4, 16)
    norm = head.verifier_norm
    torch.testing.assert_close(head.norm.weight, 1 + norm.weight)
    plain = torch.nn.functional.rms_norm(states, states.shape[-1:], eps=1e-6)
    torch.testing.assert_close(norm(states), plain * (1 + norm.weight), rtol=1e-3, atol=1e-3)


def test_a_head_that_cannot_go_on_is_refused_in_a_line(tmp_path: Path) -> None:
    head, _ = begin(toy_run(tmp_path / "first"))
    again = toy_run(tmp_path / "again", head={"init": str(tmp_path / "head")})
    with torch.no_grad():
        head.fc.weight[0] = float("nan")
    head.save_pretrained(tmp_path / "head")
    with pytest.raises(ToolError, match=r"^head.init: fc.weight .*NaN"):
        begin(again)
    head.config.transformer_layer_config.hidden_size *= 2
    head.save_pretrained(tmp_path / "head")
    with pytest.raises(ToolError, match=r"^head.init: .*"):
        begin(again)


def test_a_draft_vocabulary_is_the_likeliest_tokens_or_that_of_the_head(tmp_path: Path) -> None:
    file = toy_run(tmp_path / "run", head={"draft_vocab": 8})
    with pytest.raises(ToolError, match=r"head.draft_vocab: .*token_freq.pt is not there"):
        begin(file)
    torch.save({token: token for token in range(VOCAB)}, read_config(file).data_folder / "token_freq.pt")
    head, _ = begin(file)
    assert head.t2d.nonzero().flatten().tolist() == (torch.arange(8) + head.d2t).tolist() == list(range(24, 32))
    head.save_pretrained(tmp_path / "head")
    again, _ = begin(toy_run(tmp_path / "again", head={"init": str(tmp_path / "head")}))
    assert again.d2t.equal(head.d2t) and again.lm_head.weight.equal(head.lm_head.weight)
    with pytest.raises(ToolError, match=r"head.draft_vocab: is 6, but the head of head.init \(.*\) has 8; write 8$"):
        begin(toy_run(tmp_path / "fewer", head={"init": str(tmp_path / "head"), "draft_vocab": 6}))


def test_an_eagle3_head_is_the_first_depth(tmp_path: Path) -> None:
    first, batch = begin(toy_run(tmp_path / "first", head={"layers": 1}))
    fields = {name: getattr(first.config, name) for name in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")}
    layer = copy.deepcopy(first.config.transformer_layer_config)
    layer._attn_implementation = "eager"
    verifier = first.config.speculators_config.model_copy(update={"algorithm": "eagle3"})
    fields |= {"norm_before_residual": True, "speculators_config": verifier}
    eagle3 = Eagle3DraftModel(Eagle3SpeculatorConfig(transformer_layer_config=layer, **fields))
    eagle3.load_verifier_weights()
    eagle3.save_pretrained(tmp_path / "head")
    head, _ = begin(toy_run(tmp_path / "run", head={"layers": 3, "init": str(tmp_path / "head")}))
    assert head.config.norm_before_residual
    assert loss_of(head, batch, num_depths=1) == pytest.approx(loss_of(eagle3, batch, ttt_steps=1), rel=1e-5)


def test_it_begins_as_the_last_layers_of_its_target(tmp_path: Path) -> None:
    file = toy_run(tmp_path / "run", head={"layers": 4, "init": "target"})
    with pytest.raises(ToolError, match=r"head.init: target: its layers are not like the head's \('layers.5"):
        begin(file)
    config = LlamaForCausalLM.config_class.from_pretrained(tmp_path / "run/target")
    target = LlamaForCausalLM(config)
    target.save_pretrained(tmp_path / "run/target")
    head, _ = begin(file)
    for layer, source in zip(head.layers[1:], target.model.layers[5:], strict=True):
        for name, weight in source.state_dict().items():
            torch.testing.assert_close(layer.state_dict()[name], weight)
    aux = torch.arange(16 * 3).float()
    torch.testing.assert_close(head.fc(aux), aux[32:], atol=8, rtol=0)
