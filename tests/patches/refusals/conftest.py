"""What every test of a configuration needs: the plugin, a tiny target and its head."""

from pathlib import Path

import pytest

from peagle_vllm import plugin
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
