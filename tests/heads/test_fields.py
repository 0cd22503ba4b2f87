"""The fields that vLLM is given for a head: what a config means that states one thing in several places.

And vLLM's own code reads a head's config alike.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peagle_vllm.heads.config import FAMILIES, MASK_TOKEN_KEYS, default_aux_layers
from peagle_vllm.heads.convert import convert
from peagle_vllm.heads.fields import field_faults, vllm_fields
from peagle_vllm.heads.head import read_head
from tests.heads.test_selector import sharpened
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


def vllms_config(folder: Path):
    """The draft config that vLLM's SpeculativeConfig by itself ends with for method eagle3."""
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.configs.eagle import EAGLEConfig
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    config = get_config(str(folder), trust_remote_code=False)
    return config if isinstance(config, SpeculatorsConfig) else EAGLEConfig(config, method="eagle3", model_type="eagle")


def test_mask_token_order(tmp_path: Path):
    from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

    head = SERVED["vllm-llama"]()
    head.config |= {key: place for place, key in enumerate(MASK_TOKEN_KEYS)} | {"dflash_config": {"mask_token_id": 9}}
    assert read_head(head.save(tmp_path)).mask_token_id == get_parallel_drafting_token_id(vllms_config(tmp_path)) == 9
    del head.config["dflash_config"]
    for place, key in enumerate(MASK_TOKEN_KEYS):
        read = read_head(head.save(tmp_path))
        assert (read.mask_token_id, read.mask_token_key) == (place, key)
        assert get_parallel_drafting_token_id(vllms_config(tmp_path)) == place
        del head.config[key]
    assert read_head(head.save(tmp_path)).mask_token_key is None


def test_the_classes_that_know_mask_hidden():
    """vLLM's registry leads exactly these names to the Llama and Qwen3 classes; a new one must be added here."""
    from vllm.model_executor.models.registry import _SPECULATIVE_DECODING_MODELS as registry

    for family in ("llama", "qwen3"):
        names = {name for name, (module, _) in registry.items() if module == f"{family}_eagle3"}
        after_prefix = {name for name in names if name.startswith(("Eagle3", "Peagle")) or name.endswith("Eagle3")}
        assert after_prefix == {name for name in FAMILIES if FAMILIES[name] == family}


@pytest.mark.parametrize("num_layers", [1, 5, 7, 24])
def test_default_aux_layers(num_layers: int):
    from vllm.model_executor.models.interfaces import SupportsEagle3

    target = SimpleNamespace(model=SimpleNamespace(layers=range(num_layers)))
    default = SupportsEagle3.get_eagle3_default_aux_hidden_state_layers(target)
    assert default == default_aux_layers(num_layers)


@pytest.mark.parametrize("shards", [1, 2])
def test_no_file_of_a_selector_is_loaded_into_the_head(shards: int, tmp_path: Path):
    """vLLM passes every tensor that it finds on to the model."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    head = SERVED["vllm-llama"]()
    head.shards = shards
    folder = sharpened(head, tmp_path / "head")
    _, files, *_ = DefaultModelLoader(LoadConfig())._prepare_weights(str(folder), None, None, True, None)
    assert sorted(files) == sorted(str(path) for path in folder.glob("*.safetensors"))
    assert len(files) == shards
