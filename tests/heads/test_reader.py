"""Reading heads: every dialect, file layout and number type; and what cannot be read."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from peagle_vllm.heads.files import HeadError
from peagle_vllm.heads.head import read_head
from tests.heads.writers import AUX, speculators
from tests.heads.writers import vllm as vllm_format


def test_aux_layers_may_stand_in_eagle_config(tmp_path: Path):
    head = vllm_format()
    head.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    assert read_head(head.save(tmp_path)).aux_layer_ids == tuple(AUX[3])
    head.config["eagle_aux_hidden_state_layer_ids"] = []
    read = read_head(head.save(tmp_path))
    assert (read.aux_layer_ids, read.aux_key) == ((1, 3, 5), "eagle_config.eagle_aux_hidden_state_layer_ids")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shards", [1, 3])
def test_mask_hidden_in_every_number_type(dtype: torch.dtype, shards: int, tmp_path: Path):
    head = speculators()
    head.shards = shards
    wanted = head.tensors["mask_hidden"].to(dtype)
    head.tensors = {name: value.to(dtype) for name, value in head.tensors.items()}
    read = read_head(head.save(tmp_path))
    assert set(read.tensors) == set(head.tensors) and len({info.file for info in read.tensors.values()}) == shards
    np.testing.assert_array_equal(read.array("mask_hidden"), wanted.float().numpy())


def edit(file: str = "config.json", **fields):
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | fields
        (folder / file).write_text(json.dumps(config))

    return damage


INDEX = "model.safetensors.index.json"


def same_tensor_twice(folder: Path) -> None:
    twice = vllm_format()
    twice.tensors["model.fc.weight"] = twice.tensors["fc.weight"].clone()
    twice.save(folder)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (edit(hidden_size=None), "hidden_size is null, needs a whole number above 0"),
        (edit(num_aux_hidden_states=10**12), "num_aux_hidden_states is 1000000000000"),
        (edit(eagle_aux_hidden_state_layer_ids=[2, True, 5]), "needs a list of whole numbers"),
        (edit(architectures="LlamaForCausalLMEagle3"), "architectures is"),
        (edit(eagle_config=[1]), "eagle_config is [1], needs a JSON object"),
        (edit(speculators_model_type="peagle"), "transformer_layer_config is null"),
        (edit(INDEX), "weight_map is missing"),
        (edit(INDEX, weight_map={"fc": "absent.safetensors"}), f"absent.safetensors is missing, and {INDEX} names it"),
        (same_tensor_twice, "are the same tensor"),
    ],
)
def test_what_cannot_be_read_is_one_line(damage, words: str, tmp_path: Path):
    damage(vllm_format().save(tmp_path))
    with pytest.raises(HeadError) as caught:
        read_head(tmp_path)
    line = str(caught.value)
    assert words in line
    assert str(tmp_path) in line
    assert "\n" not in line
