"""Engines of several processes, tensor and data parallel: the output is that of one."""

import json
import sys
import urllib.request

import pytest

from tests.features.comparing import SETTINGS, Case, K, outputs, tokens
from tests.models import PEAGLE, TARGET, prompt_token_ids
from tests.serving import Server, environment, free_port, running

pytestmark = pytest.mark.arm("plugin-v1")

SPECULATIVE = {"method": "eagle3", "model": str(PEAGLE), "num_speculative_tokens": K, "parallel_drafting": True}


def command(port: int, *arguments: str) -> list[str]:
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(TARGET), "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "192", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(64 << 20)),
        *("--speculative-config", json.dumps(SPECULATIVE), *arguments),
    ]


def complete(server: Server, case: Case) -> list[int]:
    body = {
        "model": "tiny",
        "prompt": prompt_token_ids()[case.prompt],
        "max_tokens": case.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["token_ids"]


@pytest.mark.parametrize("kind", ["tensor", pytest.param("data", marks=pytest.mark.full)])
def test_two_ranks_give_the_output_of_one(kind: str):
    cases = [Case(i, 24) for i in range(4)]
    alone = [tokens(output)[0] for output in outputs(SETTINGS, cases)]
    port = free_port()
    env = environment() | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # two ranks may have to share a core
    with running(command(port, f"--{kind}-parallel-size", "2"), port, env) as server:
        together = [complete(server, case) for case in cases]
        drafted = server.metric("vllm:spec_decode_num_draft_tokens_total")
        verified = server.metric("vllm:spec_decode_num_drafts_total")
        steps = server.metric("vllm:peagle_draft_steps_total")
    assert together == alone
    assert drafted > 0
    assert steps == verified + len(cases)  # one rank reports; a request's last drafts are never verified
