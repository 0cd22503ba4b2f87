"""Reading heads: every dialect, file layout and number type; and what cannot be read."""

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from peagle_tools.inspect import head_report
from peagle_vllm.heads import config as configs
from peagle_vllm.heads.files import HeadError
from peagle_vllm.heads.head import read_head
from tests.heads.writers import AUX, HIDDEN, speculators
from tests.heads.writers import vllm as vllm_format


def test_aux_layers_may_stand_in_eagle_config(tmp_path: Path):
    head = vllm_format()
    head.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    assert read_head(head.save(tmp_path)).aux_layer_ids == tuple(AUX[3])
    head.config["eagle_aux_hidden_state_layer_ids"] = []
    read = read_head(head.save(tmp_path))
    assert (read.aux_layer_ids, read.aux_key) == ((1, 3, 5), "eagle_config.eagle_aux_hidden_state_layer_ids")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shards", [1, 3])
def test_mask_hidden_in_every_number_type(dtype: torch.dtype, shards: int, tmp_path: Path):
    head = speculators()
    head.shards = shards
    wanted = head.tensors["mask_hidden"].to(dtype)
    head.tensors = {name: value.to(dtype) for name, value in head.tensors.items()}
    read = read_head(head.save(tmp_path))
    assert set(read.tensors) == set(head.tensors) and len({info.file for info in read.tensors.values()}) == shards
    vector = read.mask_hidden()
    assert vector.dtype == np.float32 and vector.shape == (3 * HIDDEN,)
    np.testing.assert_array_equal(vector, wanted.float().numpy().ravel())


def edit(**fields):
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps(config))

    return damage


def change_header(old: str, new: str):
    """``new`` is at most as long as ``old``, so that the header keeps its length."""

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        raw, padding = path.read_bytes(), len(old) - len(new)
        assert raw.count(old.encode()) >= 1
        path.write_bytes(raw.replace(old.encode(), new.encode() + b" " * padding, 1))

    return damage


def long_name(folder: Path) -> None:
    head = vllm_format()
    head.tensors["x" * 201] = torch.ones(1)
    head.save(folder)


def index_of(**weight_map):
    def damage(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return damage


def same_tensor_twice(folder: Path) -> None:
    twice = vllm_format()
    twice.tensors["model.fc.weight"] = twice.tensors["fc.weight"].clone()
    twice.save(folder)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json is not valid JSON"),
        (edit(hidden_size=None), "hidden_size is null, needs a whole number above 0"),
        (edit(num_aux_hidden_states=10**12), "num_aux_hidden_states is 1000000000000"),
        (edit(eagle_aux_hidden_state_layer_ids=[2, True, 5]), "needs a list of whole numbers"),
        (edit(architectures="LlamaForCausalLMEagle3"), "architectures is"),
        (edit(eagle_config=[1]), "eagle_config is [1], needs a JSON object"),
        (edit(speculators_model_type="peagle"), "transformer_layer_config is null"),
        (change_header('"dtype":"F32"', '"dtype":"F64"'), "model.safetensors is not a complete safetensors file"),
        (change_header('"data_offsets":[0,', '"data_offsets":[8,'), "model.safetensors is not a complete safetensors"),
        (change_header('"dtype":"F32"', '"dtype":"F3"'), "model.safetensors is not a complete safetensors file"),
        (long_name, "names a tensor of 201 characters"),
        (index_of(), "weight_map is missing"),
        (index_of(fc="../model.safetensors"), 'weight_map names "../model.safetensors"'),
        (index_of(fc="absent.safetensors"), "absent.safetensors is not a complete safetensors file (it is missing"),
        (index_of(fc="model.safetensors"), "lacks fc"),
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


def test_a_name_that_stands_there_twice(tmp_path: Path):
    """safetensors itself takes the last one: another shape of as many numbers."""
    file = speculators().save(tmp_path) / "model.safetensors"
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    entry = json.loads(raw[8:end])["fc.weight"]
    first = json.dumps({"fc.weight": entry | {"shape": entry["shape"][::-1]}}).encode()
    header = first[:-1] + b"," + raw[9:end]
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[end:])
    assert torch.equal(load_file(file)["fc.weight"], torch.ones(16, 48))
    with pytest.raises(HeadError, match="its header names something twice"):
        read_head(tmp_path)


def test_every_dialect_has_a_name_for_the_report():
    assert set(head_report.DIALECTS) == set(get_args(configs.Dialect))
