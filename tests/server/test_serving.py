"""The server answers streams, shows what it drafted, and survives clients that leave or come at once; a short soak."""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from tests.soak.run import Ask, Tally, run
from tests.support.models import heldout
from tests.support.serving import Server, environment, free_port, running

MODEL = "tiny-llama"
PROMPTS = heldout()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    port = free_port()
    command = ["bash", "examples/serve.sh", "--host", "127.0.0.1", "--port", str(port)]
    # The worker in the engine's process: one import of vLLM less.
    env = environment() | {"TARGET": "tiny", "PYTHON": sys.executable, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with running(command, port, env) as server:
        yield server


@pytest.fixture
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)


def ask(client: OpenAI, prompt: str, **more: Any) -> Any:
    """A greedy question; ``more`` of its parameters."""
    messages: Any = [{"role": "user", "content": prompt}]
    return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=48, **more)


def chat(client: OpenAI, prompt: str) -> str:
    return ask(client, prompt).choices[0].message.content


# Before the first test that starts the server above, which then runs until the last one.
@pytest.mark.full
def test_a_minute_of_everything_at_once():
    report = run(seconds=60, runner="V1")
    assert not report["wrong"], "\n".join(report["wrong"][:20])
    assert report["answers compared"] > 50 and report["preemptions"] > 10
    assert report["ended"]["left"] and report["ended"]["refused"]


def test_what_is_wrong_is_noticed():
    """A wrong answer, a request that never ended, and one that was to be refused."""
    tally, ask, right = Tally(), Ask("chat", {}, known=0), {0: ("right", "stop")}
    tally.note(ask, "answered", ("right", "stop"), right)
    assert not tally.wrong
    tally.note(ask, "answered", ("wrong", "stop"), right)
    tally.note(ask, "APITimeoutError: Request timed out.", None, right)
    tally.note(Ask("wrong", {}), "500", None, right)
    tally.note(Ask("wrong", {}), "answered", ("yes", "stop"), right)
    assert len(tally.wrong) == 4


def test_metrics_show_the_drafts(server: Server, client: OpenAI) -> None:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    before = [server.metric(f"vllm:spec_decode_{name}_total") for name in names]
    chat(client, PROMPTS[2])
    drafts, draft_tokens, accepted, per_position = (
        server.metric(f"vllm:spec_decode_{name}_total") - old for name, old in zip(names, before, strict=True)
    )
    assert drafts > 0
    assert draft_tokens == 5 * drafts
    assert 0 < accepted <= draft_tokens
    assert accepted == per_position


def test_a_client_that_leaves(server: Server, client: OpenAI) -> None:
    expected = chat(client, PROMPTS[3])
    for prompt in PROMPTS[4:8]:
        long: Any = {"max_tokens": 900, "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(model=MODEL, prompt=prompt, temperature=0, stream=True, **long)
        next(iter(stream))
        stream.close()
    deadline = time.monotonic() + 60
    while server.metric("vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.metric("vllm:num_requests_running") == 0, "an abandoned request still runs"
    assert chat(client, PROMPTS[3]) == expected


def test_32_clients_at_once(client: OpenAI) -> None:
    prompts = PROMPTS[:32]
    alone = [chat(client, prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        streams = [*pool.map(lambda prompt: [*ask(client, prompt, stream=True)], prompts)]
    pieces = ([piece.choices[0].delta.content or "" for piece in stream if piece.choices] for stream in streams)
    assert [*map("".join, pieces)] == alone
    assert [chat(client, prompt) for prompt in prompts[:4]] == alone[:4]
