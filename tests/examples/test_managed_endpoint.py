"""A deployment that is configured through its environment only."""

import json
import sys
import urllib.request
from pathlib import Path

from examples.managed_endpoint.entrypoint import arguments
from tests.serving import ROOT, environment, free_port, running

FOLDER = Path("examples/managed_endpoint")


def variables(file: str) -> dict[str, str]:
    """A file as ``docker run --env-file`` reads it."""
    lines = (ROOT / FOLDER / file).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_variables_become_flags() -> None:
    given = {"SM_VLLM_MODEL": "m", "SM_VLLM_ENFORCE_EAGER": "", "SM_VLLM_ENABLE_PREFIX_CACHING": "false", "HOME": "/"}
    assert arguments(given) == ["--no-enable-prefix-caching", "--enforce-eager", "--model", "m", "--port", "8080"]
    assert arguments({"SM_VLLM_PORT": "1"}) == ["--port", "1"]


def test_published_pair_is_the_published_command() -> None:
    flags = arguments(variables("gpt-oss-20b.env"))
    config = json.loads(flags[flags.index("--speculative-config") + 1])
    assert flags[flags.index("--model") + 1] == "openai/gpt-oss-20b"
    assert config == {
        "method": "eagle3",
        "model": "amazon/gpt-oss-20b-p-eagle",
        "num_speculative_tokens": 7,
        "parallel_drafting": True,
    }


def test_endpoint_serves_with_drafts() -> None:
    port = free_port()
    given = variables("tiny.env") | {"SM_VLLM_PORT": str(port), "SM_VLLM_HOST": "127.0.0.1"}
    command = [sys.executable, str(FOLDER / "entrypoint.py")]
    with running(command, port, environment() | given, ready="/ping") as server:
        body = {"messages": [{"role": "user", "content": "def greet(name):\n"}], "max_tokens": 32, "temperature": 0}
        request = urllib.request.Request(
            server.url + "/invocations", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)
        assert answer["choices"][0]["message"]["content"]
        assert server.metric("vllm:spec_decode_num_drafts_total") > 0
