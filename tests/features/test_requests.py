"""What a request can ask for: the answer is the one that comes without speculation."""

import json
import math
from dataclasses import replace

import pytest

from tests.features.comparing import SETTINGS, Case, both, outputs, texts, tokens

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "cd"]}, "flag": {"type": "boolean"}},
    "required": ["name", "flag"],
    "additionalProperties": False,
}


def test_greedy_stop_strings_and_penalties_are_those_without_speculation():
    plain_text = texts(outputs(SETTINGS, [Case(max_tokens=32)])[0])[0]
    stop = plain_text[12:15]
    cases = [
        Case(),
        Case(1, sampling=(("stop", [stop]),)),
        Case(0, 32, sampling=(("stop", [stop]),)),
        Case(3, sampling=(("ignore_eos", False), ("min_tokens", 4))),
        Case(4, sampling=(("repetition_penalty", 1.3), ("presence_penalty", 0.5))),
    ]
    for plain, speculated in both(SETTINGS, cases):
        assert tokens(speculated) == tokens(plain)
        assert texts(speculated) == texts(plain)
        assert [c.finish_reason for c in speculated.outputs] == [c.finish_reason for c in plain.outputs]
        assert [c.stop_reason for c in speculated.outputs] == [c.stop_reason for c in plain.outputs]
    stopped = outputs(SETTINGS, cases)[2].outputs[0]
    assert stopped.stop_reason == stop and stop not in stopped.text


def test_structured_output_is_valid_and_that_without_speculation():
    from vllm.sampling_params import StructuredOutputsParams

    # A tiny model would fill the answer with the white space that JSON allows.
    settings = replace(
        SETTINGS,
        llm=(*SETTINGS.llm, ("structured_outputs_config", {"backend": "xgrammar", "disable_any_whitespace": True})),
    )
    structured = StructuredOutputsParams(json=SCHEMA)
    cases = [Case(i, 64, sampling=(("structured_outputs", structured), ("ignore_eos", False))) for i in range(3)]
    for plain, speculated in both(settings, cases):
        assert set(json.loads(texts(speculated)[0])) == {"name", "flag"}
        assert tokens(speculated) == tokens(plain)


def test_logprobs_are_those_without_speculation():
    cases = [Case(0, 16, sampling=(("logprobs", 3),)), Case(1, 16, sampling=(("logprobs", 1), ("prompt_logprobs", 1)))]
    for plain, speculated in both(SETTINGS, cases):
        assert tokens(speculated) == tokens(plain)
        for ours, theirs in zip(speculated.outputs[0].logprobs, plain.outputs[0].logprobs, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(math.isclose(ours[t].logprob, theirs[t].logprob, abs_tol=1e-3) for t in ours)


def test_several_sampled_outputs_of_one_seed_repeat_and_differ():
    case = Case(0, 24, sampling=(("n", 2), ("temperature", 1.0), ("seed", 3)))
    first, again = (tokens(outputs(SETTINGS, [case])[0]) for _ in range(2))
    assert first == again
    assert first[0] != first[1]
