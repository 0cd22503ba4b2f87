"""How many KV cache groups a head makes of its target's."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tests.drafts import targets
from tests.drafts.targets import WINDOW
from tests.support.engines import Engine, Request, Settings, engine, prepare_process
from tests.support.random_heads import HeadSpec, prompt, write_head, write_pair
from tests.support.recorder import serve_exactly
from tests.support.reference import Reference

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")


def groups(live: Engine) -> int:
    return len(live.scheduler.kv_cache_config.kv_cache_groups)


def test_a_windowed_head_makes_no_groups(tmp_path: Path):
    target, head = write_pair(tmp_path, HeadSpec(windows=(8, 8)))
    live, reference = engine(Settings(target, head, k=3, max_model_len=96)), Reference(target, head)
    assert groups(live) == 1
    report, _ = serve_exactly(live, [Request("a", prompt(30), 12), Request("b", prompt(9, 1), 12)], reference)
    assert report.rows > 6


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASHINFER"])
def test_a_windowed_head_makes_no_groups_of_latent_attention(backend: str):
    """With fewer KV heads than fill a page of DeepSeek's, vLLM would make 17 of one. FlashInfer has one window."""
    prepare_process()
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    from peagle_vllm.kv_groups import keep_windows_whole

    model, layers = torch.nn.Module(), {}
    for name, kind, window in (("target", MLAAttention, None), ("head", Attention, 1024)):
        layers[name] = kind.__new__(kind)
        torch.nn.Module.__init__(layers[name])
        layers[name].sliding_window = window
        layers[name].get_attn_backend = lambda: Mock(**{"get_name.return_value": backend})
    model.attn = layers["head"]
    keep_windows_whole(model, Mock(compilation_config=Mock(static_forward_context=layers)))
    assert ("get_kv_cache_spec" in vars(layers["head"])) is (backend == "FLASH_ATTN")


def test_the_cache_of_target_and_head_may_differ_in_dtype():
    """vLLM writes the dtype of a sparse latent attention, and of a quantized head's KV, into one config for both."""
    prepare_process()
    from peagle_vllm.kv_groups import own_cache_settings

    for of_target, of_head, loaded in (("fp8_ds_mla", "fp8_ds_mla", "auto"), ("auto", "fp8", "fp8")):
        cache = SimpleNamespace(cache_dtype=of_target, sliding_window=8)
        config = SimpleNamespace(cache_config=cache, speculative_config=SimpleNamespace(kv_cache_dtype=None))
        with own_cache_settings(config):
            cache.cache_dtype = of_head
        assert (cache.cache_dtype, cache.sliding_window) == (of_target, 8)
        assert config.speculative_config.kv_cache_dtype == loaded


def test_where_a_head_splits_the_groups_the_log_says_so(tmp_path: Path, warned):
    target = targets.write(tmp_path, "mistral")
    live = engine(Settings(target, write_head(tmp_path / "head", target, HeadSpec()), k=3, max_model_len=96))
    assert groups(live) == 5
    assert len(warned("splits the KV cache into 5 groups, because 2 of the head's layers are unlike all of")) == 1
    like = write_head(tmp_path / "like", target, HeadSpec(windows=(WINDOW,) * 2))
    assert groups(engine(Settings(target, like, k=3, max_model_len=96))) == 1
    assert len(warned("splits the KV cache")) == 1
