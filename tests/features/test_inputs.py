"""Every kind of input that a request can have, with a plain request in the batch, whose answer must stay as it is.

A prompt's embeddings have no token ids. The drafter reads token 0 in their place, as vLLM's EAGLE-3 does on V2, and the
hidden states that the target computed from them. So the reference drafts from these.
"""

import copy
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import safe_open

from tests.conftest import ARM
from tests.support.engines import BLOCK_SIZE, Request, Settings, engine, environment
from tests.support.models import PEAGLE, TARGET, prompt_token_ids
from tests.support.recorder import serve_exactly
from tests.support.reference import Reference

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")

MAX_MODEL_LEN, ANSWER = 128, 10 if ARM == "plugin-v2" else 24  # V2 runs under Triton's interpreter
BUDGET = 40  # prompts come in chunks, which end within embeddings too
SIZES = {"max_num_seqs": 6, "max_model_len": MAX_MODEL_LEN, "token_budget": BUDGET}
LLM = (("enable_prompt_embeds", True), ("skip_tokenizer_init", False))
SETTINGS = Settings(TARGET, PEAGLE, k=3, prefix_caching=True, lookup=2, llm=LLM, **SIZES)
ALONE = replace(SETTINGS, head=None, lookup=0)
OUTSIDE = 100_000  # vLLM marks embeddings among tokens by an id that can lie outside the vocabulary
PROMPTS = [tuple(ids) for ids in prompt_token_ids()[:6]]
LONG = (PROMPTS[2] * 4)[: MAX_MODEL_LEN - 1]


def embedded(name: str, prompt: tuple[int, ...], max_tokens: int = ANSWER, **more: Any) -> Request:
    with safe_open(TARGET / "model.safetensors", "pt") as weights:
        embeds = weights.get_tensor("model.embed_tokens.weight").float()[list(prompt)]
    return Request(name, prompt, max_tokens, embeds=embeds, **more)


def mixed(name: str, prompt: tuple[int, ...], start: int, end: int) -> Request:
    inside = tuple(start <= i < end for i in range(len(prompt)))
    tokens = tuple(OUTSIDE if here else token for token, here in zip(prompt, inside, strict=True))
    return replace(embedded(name, prompt), prompt=tokens, embedded=inside)


LOGPROBS = (("prompt_logprobs", 1),)
PLAIN, EMBEDS = Request("plain", PROMPTS[0], ANSWER), embedded("embeds", PROMPTS[1])
KINDS = {
    "embeddings": [EMBEDS],
    "embeddings among tokens": [mixed("middle", PROMPTS[1], 5, 30), mixed("end", PROMPTS[3], 36, len(PROMPTS[3]))],
    "the same, their prefix cached": [embedded("first", LONG[:90], 4), embedded("again", LONG[:90], arrives=12)],
    "embeddings, aborted": [embedded("aborted", PROMPTS[1], aborted=4), Request("after", PROMPTS[4], 4, arrives=6)],
    "one embedding": [embedded("short", PROMPTS[1][:1])],
    "max_tokens 1": [Request("one", PROMPTS[1], 1), embedded("one embedded", PROMPTS[2], 1)],
    # Not of embeddings among tokens: those end vLLM's V1 without any speculation, as penalties do.
    "prompt_logprobs": [replace(EMBEDS, sampling=LOGPROBS), Request("tokens", PROMPTS[4], 1, sampling=LOGPROBS)],
    "up to max_model_len": [Request("full", LONG, 1), embedded("full embedded", LONG, 1)],
}
IN_TURN = Request("same", (*PROMPTS[1], *PROMPTS[3], *PROMPTS[4])[: 3 * BLOCK_SIZE], ANSWER)


def session(settings: Settings) -> list[dict[str, list[int]]]:
    """Two turns of a resumable request, as AsyncLLM serves input that streams in, each with a plain request."""
    live = engine(settings)
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm, name = live.llm.llm_engine, "session"
    turns = []
    delta = {"temperature": 0.0, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA}
    params = SamplingParams(max_tokens=7, **delta)
    for turn in (PROMPTS[1], PROMPTS[2][:9]):
        prompt = {"prompt_token_ids": list(turn)}
        request = llm.input_processor.process_inputs(name, prompt, params, ("generate",), resumable=True)
        if turns:
            request.external_req_id = "session"
        else:
            llm.input_processor.assign_request_id(request)
            name = request.request_id
        llm.output_processor.add_request(copy.deepcopy(request), None, None, 0)  # AsyncLLM's is in another process
        llm.engine_core.add_request(request)
        llm.add_request("plain", PLAIN.vllm_prompt(), SamplingParams(max_tokens=12, **delta))
        tokens: dict[str, list[int]] = {"session": [], "plain": []}
        while len(tokens["session"]) < 7 or len(tokens["plain"]) < 12:
            for out in llm.step():
                tokens[out.request_id] += out.outputs[0].token_ids
        turns.append(tokens)
    llm.abort_request(["session"])
    return turns


def answers(requests: list[Request]) -> dict[str, list[int]]:
    done = engine(ALONE).run([replace(request, aborted=None) for request in requests])
    return {req: finished.tokens for req, finished in done.items()}


@pytest.fixture(scope="module")
def alone() -> SimpleNamespace:
    """What one engine answers without speculation."""
    kinds = {kind: answers([PLAIN, *requests]) for kind, requests in KINDS.items()}
    return SimpleNamespace(kinds=kinds, in_turn=answers([IN_TURN]), session=session(ALONE))


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_exact_and_answers_those_without_speculation(kind: str, alone: SimpleNamespace):
    live, requests = engine(SETTINGS), [PLAIN, *KINDS[kind]]
    live.llm.reset_prefix_cache()  # the hidden states that an earlier run computed are not recorded in this one
    report, _ = serve_exactly(live, requests, Reference(None, PEAGLE), alone.kinds[kind], keep_hidden=True)
    assert report.rows - report.looked_up > 2


def test_a_session_that_goes_on(alone: SimpleNamespace):
    assert session(SETTINGS) == alone.session


def test_two_requests_in_turn_with_one_id(alone: SimpleNamespace):
    """Deployments that divide prefill and decode give ids of their own. The first one's text is not looked up after."""
    answer = alone.in_turn["same"][len(IN_TURN.prompt) :]
    misleading = [token for pair in pairwise(answer) for token in (*pair, 9)]
    with environment(VLLM_DISABLE_REQUEST_ID_RANDOMIZATION="1"):
        live = engine(SETTINGS)
        live.run([replace(IN_TURN, id="its prefix, cached", max_tokens=1)])
        live.run([Request("same", (*misleading, *LONG)[: len(IN_TURN.prompt)], 4)])
        serve_exactly(live, [IN_TURN], Reference(TARGET, PEAGLE), alone.in_turn)


def test_refused_inputs_leave_the_engine_running(alone: SimpleNamespace):
    live, too_long = engine(SETTINGS), (PROMPTS[1] * 9)[: MAX_MODEL_LEN + 1]
    from vllm.exceptions import VLLMValidationError

    refused = [Request("long", too_long, 1), Request("empty", (), 1)]
    for request in (*refused, embedded("long embeddings", too_long), embedded("no embeddings", ())):
        with pytest.raises((ValueError, VLLMValidationError)):
            live.run([request])
    assert live.run([PLAIN])["plain"].tokens == alone.kinds["embeddings"]["plain"]
