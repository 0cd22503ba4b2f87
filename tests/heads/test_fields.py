"""The fields that vLLM is given for a head, where a config states one thing in several places."""

from pathlib import Path
from typing import Any

import pytest

from peagle_vllm.heads.convert import convert
from peagle_vllm.heads.fields import field_faults, vllm_fields
from peagle_vllm.heads.head import read_head
from tests.heads.writers import SERVED

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


@pytest.mark.parametrize(
    ("rope", "needs"),
    [
        ({"factor": 0.5}, "rope_parameters.factor is 0.5, needs a number from 1 to 10,000"),
        ({"rope_theta": 1}, "rope_parameters.rope_theta is 1, needs a number above 1"),
        ({"mscale": 10**400}, "needs a number from 0"),
    ],
)
def test_numbers_that_vllm_cannot_compute_with(rope: dict[str, Any], needs: str, tmp_path: Path):
    head = SERVED["speculators-llama"]()
    head.layer_config["rope_parameters"] = {"rope_theta": 1e4, **LINEAR, **rope}
    (line,) = field_faults(read_head(head.save(tmp_path)))
    assert needs in line


@pytest.mark.parametrize("method", ["torchao", None])
def test_a_quantization_that_no_head_has(method: str | None, tmp_path: Path):
    head = SERVED["vllm-llama"]()
    head.layer_config["quantization_config"] = {"quant_method": method}
    (fault,) = field_faults(read_head(head.save(tmp_path)))
    assert "needs a JSON object whose quant_method is one of" in fault
