"""Reading heads: every dialect, file layout and number type; and what cannot be read."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from peagle_vllm.heads.files import HeadError
from peagle_vllm.heads.head import read_head
from tests.heads import writers
from tests.heads.judging import Change, setting


def test_aux_layers_may_stand_in_eagle_config(tmp_path: Path):
    head = writers.vllm()
    head.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    assert read_head(head.save(tmp_path)).aux_layer_ids == tuple(writers.AUX[3])
    head.config["eagle_aux_hidden_state_layer_ids"] = []
    read = read_head(head.save(tmp_path))
    assert (read.aux_layer_ids, read.aux_key) == ((1, 3, 5), "eagle_config.eagle_aux_hidden_state_layer_ids")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shards", [1, 3])
def test_mask_hidden_in_every_number_type(dtype: torch.dtype, shards: int, tmp_path: Path):
    head = writers.speculators()
    head.shards = shards
    wanted = head.tensors["mask_hidden"].to(dtype)
    head.tensors = {name: value.to(dtype) for name, value in head.tensors.items()}
    read = read_head(head.save(tmp_path))
    assert set(read.tensors) == set(head.tensors) and len({info.file for info in read.tensors.values()}) == shards
    np.testing.assert_array_equal(read.array("mask_hidden"), wanted.float().numpy())


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("change", "index", "words"),
    [
        (setting(hidden_size=None), None, "hidden_size is null, needs a whole number above 0"),
        (setting(num_aux_hidden_states=10**12), None, "num_aux_hidden_states is 1000000000000"),
        (setting(eagle_aux_hidden_state_layer_ids=[2, True, 5]), None, "needs a list of whole numbers"),
        (setting(architectures="LlamaForCausalLMEagle3"), None, "architectures is"),
        (setting(eagle_config=[1]), None, "eagle_config is [1], needs a JSON object"),
        (setting(speculators_model_type="peagle"), None, "transformer_layer_config is null"),
        (setting(), {}, "weight_map is missing"),
        (setting(), {"weight_map": {"fc": "absent"}}, f"absent is missing, and {INDEX} names it"),
        (lambda h: h.tensors.update({"model.mask_hidden": torch.ones(2)}), None, "are the same tensor"),
    ],
)
def test_what_cannot_be_read_is_one_line(change: Change, index: dict | None, words: str, tmp_path: Path):
    change(head := writers.vllm())
    head.save(tmp_path)
    if index is not None:
        (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(HeadError) as caught:
        read_head(tmp_path)
    line = str(caught.value)
    assert words in line
    assert str(tmp_path) in line
    assert "\n" not in line
