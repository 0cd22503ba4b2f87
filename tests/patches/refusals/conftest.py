"""What every test of a configuration needs: the plugin, a tiny target and its head, and the plugin's warnings."""

import logging
from collections.abc import Iterator
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


@pytest.fixture
def warning_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """vLLM configures its logging with its first configuration, which takes every other handler away: not here."""
    monkeypatch.setenv("VLLM_CONFIGURE_LOGGING", "0")
    logger = logging.getLogger("vllm.peagle")
    caplog.set_level(logging.WARNING, logger=logger.name)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
