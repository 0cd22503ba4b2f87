"""What every test of a configuration needs: the plugin, a tiny target and its head. No engine, no weights."""

from pathlib import Path

import pytest

from peagle_vllm import plugin
from peagle_vllm.serving import RefusedError
from tests.support import random_heads as tiny_heads
from tests.support.random_heads import HeadSpec


@pytest.fixture(scope="module", autouse=True)
def registered_plugin():
    plugin.register()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tiny_heads.write_target(tmp_path / "target")


@pytest.fixture
def head(tmp_path: Path, target: Path) -> Path:
    return tiny_heads.write_head(tmp_path / "head", target, HeadSpec())


def configure(target: Path, head: Path, **changes):
    """vLLM's whole configuration for the pair; ``changes`` override entries of the speculative config."""
    from vllm.engine.arg_utils import EngineArgs

    engine = {key.removeprefix("engine_"): changes.pop(key) for key in list(changes) if key.startswith("engine_")}
    speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3, "parallel_drafting": True}
    speculative = {key: value for key, value in (speculative | changes).items() if value is not None}
    return EngineArgs(
        model=str(target), skip_tokenizer_init=True, dtype="float32", speculative_config=speculative, **engine
    ).create_engine_config()


def refusal(target: Path, head: Path, **changes) -> str:
    with pytest.raises(RefusedError) as refused:
        configure(target, head, **changes)
    line = str(refused.value)
    assert "\n" not in line and line.startswith("P-EAGLE refused: ")
    return line
