"""Where the plugin does not belong: plain EAGLE-3, platforms that are not vLLM's own."""

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from peagle_vllm.heads.files import HeadError
from peagle_vllm.patches import head_weights, validation
from peagle_vllm.serving import RefusedError, is_peagle
from tests.patches.refusals.configuring import configure, edit_config
from tests.support import random_heads as tiny_heads
from tests.support.random_heads import HeadSpec

pytestmark = pytest.mark.arm("plugin-v1")

REFUSAL = "parallel drafting for EAGLE speculative decoding"


@pytest.mark.parametrize("fmt", ["aws", "speculators"])
def test_a_peagle_head_without_the_flag_is_warned_of(target: Path, tmp_path: Path, warned, fmt: str):
    head = tiny_heads.write_head(tmp_path / fmt, target, HeadSpec(fmt=fmt))
    configure(target, head, parallel_drafting=None)
    (warning,) = warned(str(head))
    assert (
        'is served as EAGLE-3, one token a forward: if it is a P-EAGLE head, add "parallel_drafting": true' in warning
    )


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that our code looks for, on this machine or the hub; it finds none of them."""
    names: list[str] = []

    def find(model: str, revision: str | None) -> None:
        names.append(model)
        raise HeadError("no file and no network")

    monkeypatch.setattr(validation, "find", find)
    return names


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
@pytest.mark.parametrize("name", ["peagle", "eagle3"])
def test_what_is_no_peagle_costs_no_file_and_no_request(
    target: Path, head: Path, searched: list[str], method: str, name: str
):
    """Plain EAGLE-3, also of a head that was meant for P-EAGLE."""
    if method == "draft_model":
        head = tiny_heads.write_target(head.parent / "draft")
    elif name == "eagle3":
        edit_config(head, lambda c: (c.pop("mask_token_id"), c.update(speculators_model_type="eagle3")))
    config = configure(target, head, method=method, parallel_drafting=None)
    assert config.speculative_config.method == method
    assert searched == []


def other_platform(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """What a platform plugin does: its class, which is vLLM's for a CPU in all but its module, is the current one."""
    import vllm.platforms

    kind = type("Platform", (type(vllm.platforms.current_platform),), {"__module__": module})
    monkeypatch.setattr(vllm.platforms, "_current_platform", kind())


@pytest.mark.parametrize("method", ["eagle3", None])
def test_another_platform_keeps_its_own_behaviour(
    target: Path, head: Path, monkeypatch: pytest.MonkeyPatch, searched: list[str], method: str | None
):
    """vllm-ascend, for one: its runner is not ours, so nothing is read, checked, opened, extended or replaced."""
    other_platform(monkeypatch, "vllm_ascend.platform")
    config = configure(target, head, method=method)
    assert config.speculative_config.parallel_drafting and not is_peagle(config)
    assert REFUSAL in config._get_v2_model_runner_unsupported_features()
    assert searched == []


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
