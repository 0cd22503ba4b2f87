"""One server, started by the serving example, for every test in this folder."""

import sys
from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.support.models import heldout
from tests.support.serving import Server, environment, free_port, running


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    port = free_port()
    command = ["bash", "examples/serve.sh", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    # The worker in the engine's process: one import of vLLM less.
    env = environment() | {"PYTHON": sys.executable, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with running(command, port, env) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    return heldout()
