"""A head's config is read as vLLM reads it, by vLLM's own code."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from peagle_vllm.heads.config import FAMILIES, MASK_TOKEN_KEYS, default_aux_layers
from peagle_vllm.heads.head import read_head
from tests.heads.test_selector import sharpened
from tests.heads.writers import SERVED


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
