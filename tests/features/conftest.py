"""What vLLM logs."""

import logging
from collections.abc import Iterator

import pytest

from tests.features.comparing import SETTINGS
from tests.support.engines import engine


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """All logs from DEBUG on, vLLM's too, of engines that start now; what is said once is said again."""
    engine(SETTINGS)  # the first engine of a process sets the log up
    from vllm import logger

    logger._print_info_once.cache_clear()
    vllm_logger = logging.getLogger("vllm")
    vllm_logger.addHandler(caplog.handler)
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, "vllm"):
        yield caplog
    vllm_logger.removeHandler(caplog.handler)
