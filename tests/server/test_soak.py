"""The soak (tests/soak/run.py), short: ``make soak`` is the long one. And that it notices what it is there for."""

from dataclasses import asdict
from typing import Any

import pytest

from tests.soak import watching
from tests.soak.clients import Answer, Tally, note
from tests.soak.run import run
from tests.soak.traffic import Ask

WHOLE = {
    "vllm:num_requests_running": 0.0,
    "vllm:num_requests_waiting": 0.0,
    "vllm:kv_cache_usage_perc": 0.0,
    "vllm:num_preemptions_total": 3.0,
    "vllm:request_success_total finished_reason=stop": 4.0,
    "vllm:request_success_total finished_reason=length": 6.0,
    "vllm:generation_tokens_total": 100.0,
    "vllm:prompt_tokens_total": 300.0,
    "vllm:spec_decode_num_drafts_total": 40.0,
    "vllm:spec_decode_num_draft_tokens_total": 200.0,
    "vllm:spec_decode_num_accepted_tokens_total": 50.0,
    "vllm:spec_decode_num_accepted_tokens_per_pos_total position=0": 30.0,
    "vllm:spec_decode_num_accepted_tokens_per_pos_total position=1": 20.0,
}
SEEN = Tally(choices=10, prompt_tokens=300, output_tokens=100)


@pytest.mark.full
def test_a_minute_of_everything_at_once():
    report = run(seconds=60, runner="V1")
    assert not report["wrong"], "\n".join(report["wrong"][:20])
    assert report["answers compared"] > 50 and report["preemptions"] > 10
    assert min(report["faults"].values()) > 0


@pytest.mark.parametrize(
    ("fault", "counter", "change"),
    [
        ("requests run", "num_requests_running", 1),
        ("requests wait", "num_requests_waiting", 1),
        ("KV blocks are in use", "kv_cache_usage_perc", 0.02),
        ("9.0 choices finished", "request_success_total finished_reason=stop", -1),
        ("errors inside", "request_success_total finished_reason=error", 1),
        ("99.0 output tokens", "generation_tokens_total", -1),
        ("299.0 prompt tokens", "prompt_tokens_total", -1),
        ("201.0 draft tokens in 40.0 drafts", "spec_decode_num_draft_tokens_total", 1),
        ("49.0 accepted tokens", "spec_decode_num_accepted_tokens_total", -1),
        ("accepted by position", "spec_decode_num_accepted_tokens_per_pos_total position=1", 15),
        ("no preemption", "num_preemptions_total", -3),
    ],
)
def test_a_wrong_counter_is_noticed(fault: str, counter: str, change: float):
    assert watching.add_up(WHOLE, {}, SEEN) == []
    name = f"vllm:{counter}"
    assert any(fault in line for line in watching.add_up(WHOLE | {name: WHOLE.get(name, 0) + change}, {}, SEEN))


@pytest.mark.parametrize(
    ("ended", "answers", "refused"),
    [
        ("answered", [("wrong", "stop", 3)], False),
        ("answered", [("right", "length", 3)], False),
        ("answered", [("right", "stop", 3)], True),
        ("500", [], True),
        ("stuck", [], False),
        ("failed: ClientOSError: ", [], False),
    ],
)
def test_a_wrong_end_of_a_request_is_noticed(ended: str, answers: list[Answer], refused: bool):
    def noted(ended: str, answers: list[Answer], refused: bool) -> dict[str, Any]:
        tally = Tally()
        ask = Ask("chat", "/", {"max_tokens": 3}, known=0, refused=refused)
        note(tally, ask, ended, answers, {}, {0: ("right", "stop", 3)})
        return asdict(tally)

    assert noted("answered", [("right", "stop", 3)], False)["wrong"] == []
    assert len(noted(ended, answers, refused)["wrong"]) == 1


@pytest.mark.parametrize(("what", "growth"), [("megabytes", 20.0), ("files", 10.0)])
def test_what_grows_is_noticed(what: str, growth: float):
    flat = [{"megabytes": 500.0, "files": 100.0} for _ in range(40)]
    assert watching.grown(flat) == []
    assert len(watching.grown([each | {what: each[what] + growth * i} for i, each in enumerate(flat)])) == 1
