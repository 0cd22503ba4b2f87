"""Where the plugin does not belong: plain EAGLE-3, platforms that are not vLLM's own."""

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from peagle_vllm.patches import head_weights, validation
from peagle_vllm.serving import RefusedError, is_peagle
from tests.patches.refusals.conftest import configure
from tests.support import random_heads as tiny_heads
from tests.support.dialects import edit
from tests.support.random_heads import HeadSpec

pytestmark = pytest.mark.arm("plugin-v1")


@pytest.mark.parametrize("fmt", ["aws", "speculators"])
def test_a_peagle_head_without_the_flag_is_warned_of(target: Path, tmp_path: Path, warned, fmt: str):
    head = tiny_heads.write_head(tmp_path / fmt, target, HeadSpec(fmt=fmt))
    configure(target, head, parallel_drafting=None)
    (warning,) = warned(str(head))
    assert "is served as EAGLE-3, one token a forward" in warning and 'add "parallel_drafting": true' in warning


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
@pytest.mark.parametrize("name", ["peagle", "eagle3"])
def test_what_is_no_peagle_costs_no_file_and_no_request(
    target: Path, head: Path, monkeypatch: pytest.MonkeyPatch, method: str, name: str
):
    """Plain EAGLE-3, also of a head that was meant for P-EAGLE."""
    if method == "draft_model":
        head = tiny_heads.write_target(head.parent / "draft")
    elif name == "eagle3":
        edit(head, lambda h: (h.config.pop("mask_token_id"), h.config.update(speculators_model_type="eagle3")))
    monkeypatch.setattr(validation, "_find", None)  # in a folder, the cache or the hub
    config = configure(target, head, method=method, parallel_drafting=None)
    assert config.speculative_config.method == method


def other_platform(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """What a platform plugin does: its class, which is vLLM's for a CPU in all but its module, is the current one."""
    import vllm.platforms

    kind = type("Platform", (type(vllm.platforms.current_platform),), {"__module__": module})
    monkeypatch.setattr(vllm.platforms, "_current_platform", kind())


@pytest.mark.parametrize("method", ["eagle3", None])
def test_another_platform_keeps_its_own_behaviour(
    target: Path, head: Path, monkeypatch: pytest.MonkeyPatch, method: str | None
):
    """vllm-ascend, for one: its runner is not ours, so nothing is read, checked, opened, extended or replaced."""
    other_platform(monkeypatch, "vllm_ascend.platform")
    monkeypatch.setattr(validation, "_find", None)
    config = configure(target, head, method=method)
    assert config.speculative_config.parallel_drafting and not is_peagle(config)
    unsupported = config._get_v2_model_runner_unsupported_features()
    assert "parallel drafting for EAGLE speculative decoding" in unsupported


def test_another_platform_loads_heads_by_itself(monkeypatch: pytest.MonkeyPatch):
    """What vLLM's own would refuse, and drop, reaches the class as it is."""
    body = {"load_weights": lambda self, weights: [*weights], "use_parallel_drafting": True}
    body |= {"config": None, "lm_head": None, "model": SimpleNamespace(embed_tokens=None)}
    module = ModuleType("vllm.model_executor.models.llama_eagle3")
    head = module.Eagle3LlamaForCausalLM = type("Head", (), body | {"draft_id_to_target_id": None})
    next(hook for name, hook in head_weights.PATCH.hooks if name == module.__name__)(module)
    weights = [("model.d2t", torch.tensor([float("nan")]))]
    with pytest.raises(RefusedError):
        head().load_weights(weights)
    other_platform(monkeypatch, "vllm_ascend.platform")
    assert head().load_weights(weights) == weights
