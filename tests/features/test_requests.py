"""What a request can ask for: the answer is the one that comes without speculation."""

import json
import math
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.conftest import ARM
from tests.drafts.test_larger_target import grown
from tests.features.asking import SETTINGS, ask, both
from tests.support.engines import engine
from tests.support.models import TARGET

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")

SEEDED = {"seed": 2**63 - 1, "n": 2, "temperature": 1.0}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "cd"]}, "flag": {"type": "boolean"}},
    "required": ["name", "flag"],
    "additionalProperties": False,
}


def test_greedy_stop_strings_and_penalties_are_those_without_speculation():
    request = ask(max_tokens=32)
    stop = engine(SETTINGS).run([request])[request.id].raw.outputs[0].text[12:15]
    requests = [
        ask(),
        ask(1, stop=[stop]),
        ask(0, 32, stop=[stop]),
        ask(3, ignore_eos=False, min_tokens=4),
        ask(4, repetition_penalty=1.3, presence_penalty=0.5),
        *(ask(i, min_tokens=minimum, stop_token_ids=[227]) for i, minimum in ((0, 12), (1, 7), (1, 10))),
        ask(2, 60, min_tokens=50, stop_token_ids=[*range(180, 300)]),  # far from its minimum V1 verifies drafts
    ]
    answers = [(plain.raw.outputs[0], speculated.raw.outputs[0]) for plain, speculated in both(SETTINGS, requests)]
    for plain, speculated in answers:
        for name in ("token_ids", "text", "finish_reason", "stop_reason"):
            assert getattr(speculated, name) == getattr(plain, name)
    stopped = answers[2][1]
    assert stopped.stop_reason == stop and stop not in stopped.text


@pytest.mark.parametrize("padding", [0, 8])
def test_structured_output_is_valid_and_that_without_speculation(padding: int, tmp_path: Path):
    """Also of a target whose vocabulary was padded, and beside a plain request."""
    from vllm.sampling_params import StructuredOutputsParams

    target = grown(shutil.copytree(TARGET, tmp_path / "target"), padding, likely=0.0)
    # A tiny model would fill the answer with the white space that JSON allows.
    xgrammar = ("structured_outputs_config", {"backend": "xgrammar", "disable_any_whitespace": True})
    structured = StructuredOutputsParams(json=SCHEMA)
    requests = [ask(i, 64, structured_outputs=structured, ignore_eos=False) for i in range(3)]
    settings = replace(SETTINGS, target=target, llm=(*SETTINGS.llm, xgrammar))
    for plain, speculated in both(settings, [*requests, ask(3)]):
        if "structured_outputs" in dict(speculated.request.sampling):
            assert set(json.loads(speculated.raw.outputs[0].text)) == {"name", "flag"}
        assert speculated.output == plain.output


def test_logprobs_are_those_without_speculation():
    for plain, speculated in both(SETTINGS, [ask(0, 16, logprobs=3), ask(1, 16, logprobs=1, prompt_logprobs=1)]):
        assert speculated.output == plain.output
        assert [at and set(at) for at in speculated.raw.prompt_logprobs or ()] == [
            at and set(at) for at in plain.raw.prompt_logprobs or ()
        ]
        for ours, theirs in zip(speculated.raw.outputs[0].logprobs, plain.raw.outputs[0].logprobs, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(math.isclose(ours[t].logprob, theirs[t].logprob, abs_tol=1e-3) for t in ours)


@pytest.mark.arm("plugin-v1")
def test_prompt_logprobs_survive_what_drafts_overwrite():
    """CUDA graphs of the drafter use the memory in which the target's leave its hidden states."""
    live, request, states = engine(SETTINGS), ask(1, 4, prompt_logprobs=1), []
    right = live.run([request])[request.id].raw.prompt_logprobs
    forward, propose = live.runner._model_forward, live.drafter.propose

    def keep(*args, **kwargs):
        states.append(forward(*args, **kwargs))
        return states[-1]

    def overwrite(*args, **kwargs):
        drafts = propose(*args, **kwargs)
        states[-1][0].zero_()
        return drafts

    with patch.object(live.runner, "_model_forward", keep), patch.object(live.drafter, "propose", overwrite):
        assert live.run([request])[request.id].raw.prompt_logprobs == right


@pytest.mark.parametrize(
    ("what", "parameters", "problem"),
    [
        ("plugin-v1", {"logprob_token_ids": [5, 6]}, "logprob_token_ids needs Model Runner V2"),
        ("plugin-v2", {"allowed_token_ids": [7] * 1025}, "allowed_token_ids holds 1025 tokens; .* takes 1024"),
        ("plugin-v2", {"bad_words": ["a" * 1024]}, "bad_words makes .* tokens; .* takes 1024"),
        # With the end of text.
        ("plugin-v2", {"min_tokens": 1, "stop_token_ids": [*range(9, 137)]}, "stop_token_ids .* 129 tokens"),
        ("neither", {"allowed_token_ids": [7] * 1024}, "-"),
        ("plugin-v2", SEEDED, "seed is 9223372036854775808, where .* takes 64 bits"),
        pytest.param(ARM, {"max_tokens": 2**31}, "max_tokens is 2147483648", marks=pytest.mark.arm("plugin-v2")),
    ],
)
def test_requests_that_end_the_other_runner_are_answered(what, parameters, problem):
    """The engine of the runner that cannot serve one refuses it, and goes on."""
    from vllm.exceptions import VLLMValidationError

    live, refused = engine(SETTINGS), pytest.raises(VLLMValidationError, match=problem)
    with refused if what == ARM else nullcontext():
        (answer,) = live.run([ask(**{"max_tokens": 2} | parameters)]).values()
        assert len(answer.output) == 2
        if "logprob_token_ids" in parameters:
            assert {5, 6} <= set(answer.raw.outputs[0].logprobs[0])
    assert len(live.run([ask(1, 2)]).popitem()[1].output) == 2


def test_several_sampled_outputs_of_one_seed_repeat_and_differ():
    live = engine(SETTINGS)
    from vllm.sampling_params import RequestOutputKind

    request = ask(n=2, temperature=1.0, seed=3, output_kind=RequestOutputKind.FINAL_ONLY)
    first, again = ([out.token_ids for out in live.run([request])[request.id].raw.outputs] for _ in range(2))
    assert first == again
    assert first[0] != first[1]
