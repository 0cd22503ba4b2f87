"""The fields that vLLM is given for a head, where a config states one thing in several places."""

from pathlib import Path
from typing import Any

import pytest

from peagle_vllm.heads.convert import convert
from peagle_vllm.heads.fields import field_faults, vllm_fields
from peagle_vllm.heads.head import read_head
from tests.heads.writers import SERVED


def test_windows_that_trainers_copy_from_the_target_are_none(tmp_path: Path):
    head = SERVED["nemo"]()
    head.config |= {"layer_types": ["sliding_attention"] * head.config["num_hidden_layers"], "sliding_window": 128}
    fields = vllm_fields(read_head(head.save(tmp_path)))
    assert fields["layer_types"] is fields["sliding_window"] is None


LINEAR = {"rope_type": "linear", "factor": 4}


@pytest.mark.parametrize("to", ["vllm", "speculators"])
@pytest.mark.parametrize(
    ("name", "layers", "rope"),
    [
        ("speculators-llama", {"rope_scaling": {"rope_type": "default"}, "rope_parameters": LINEAR}, "linear"),
        ("vllm-llama", {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default"}}, "linear"),
        ("speculators-llama", {"rope_scaling": LINEAR}, "linear"),
        ("vllm-llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 1, "alpha": 1000.0}}, "dynamic"),
        ("vllm-llama", {"rotary_emb_base": 5e5}, "default"),
        ("vllm-llama", {"rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 5e5, **LINEAR}}, "linear"),
        ("speculators-llama", {"rope_scaling": {"rope_theta": 5e5, **LINEAR}, "rope_parameters": LINEAR}, "linear"),
        ("vllm-llama", {"model_type": "qwen2", "rope_parameters": {"rope_type": "default"}}, "default"),
        ("vllm-qwen3", {"max_window_layers": 0, "sliding_window": 4, "use_sliding_window": True}, "default"),
    ],
)
def test_a_copy_means_the_same(name: str, layers: dict[str, Any], rope: str, to: str, tmp_path: Path):
    head = SERVED[name]()
    theta = 5e5 if "500000.0" in str(layers) else 10000.0
    if theta != 10000.0 or "model_type" in layers:
        head.layer_config.pop("rope_theta", None)
    head.layer_config.update(layers)
    (tmp_path / "copy").mkdir()
    source = read_head(head.save(tmp_path / "head"))
    assert not list(field_faults(source))
    fields = vllm_fields(source)
    assert fields["rope_parameters"]["rope_type"] == rope
    assert fields["rope_parameters"].get("alpha") == layers.get("rope_parameters", {}).get("alpha")
    assert fields["rope_parameters"]["rope_theta"] == theta
    assert isinstance(fields["rope_parameters"].get("factor", 1.0), float)  # vLLM fails at a whole number
    convert(source, tmp_path / "copy", to, None)
    copied = vllm_fields(read_head(tmp_path / "copy"))
    same = ("rope_parameters", "layer_types", "sliding_window")
    assert {key: copied[key] for key in same} == {key: fields[key] for key in same}
