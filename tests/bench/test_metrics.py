"""Acceptance from counters, on numbers small enough to check by hand."""

from types import SimpleNamespace
from unittest.mock import Mock

from peagle_tools.bench.metrics import AL, metric, without_speculation
from peagle_tools.shared.acceptance import Acceptance, Answer, by_repeated, read_engine


def test_an_engines_counters() -> None:
    """Before the first draft vLLM has no counts by position; without speculation it has no such counters at all."""

    def engine(**counts: int | list[int]) -> SimpleNamespace:
        metrics = [
            SimpleNamespace(name=f"vllm:spec_decode_num_{name}", **{"values" if isinstance(n, list) else "value": n})
            for name, n in counts.items()
        ]
        return SimpleNamespace(get_metrics=lambda: [SimpleNamespace(name="vllm:num_requests", value=7), *metrics])

    before = read_engine(engine(drafts=4, draft_tokens=12, accepted_tokens=5, accepted_tokens_per_pos=[3, 2, 0]))
    after = read_engine(engine(drafts=14, draft_tokens=42, accepted_tokens=22, accepted_tokens_per_pos=[11, 8, 3]))
    assert after.since(before) == Acceptance(10, (8, 6, 3))
    assert after.since(read_engine(engine())) == after
    assert (read_engine(engine()).length, read_engine(engine()).shares) == (1.0, ())


def test_steps_without_drafts_count() -> None:
    """n-gram's: 10 answers of 64 tokens in 345 steps, 112 of them with drafts. vLLM says 3.54."""
    cell = {"output_lens": [64] * 10, "spec_decode_num_drafts": 112, "spec_decode_accepted_tokens": 285, AL: 3.54}
    assert metric(cell, AL) == 1 + 285 / 345 and metric({"output_lens": [64]}, AL) == 1


def test_the_base_is_the_fastest_arm_without_speculation() -> None:
    arms = [Mock(dataset="d", concurrency=1, k=0, tokens_per_second=Mock(median=speed)) for speed in (5, 9, 7)]
    assert without_speculation(arms) == {("d", 1): arms[1]}


def test_drafts_are_counted_by_the_last_tokens_that_occurred_before() -> None:
    """Of 1 2 3 4 1 2 9 3 4 1 the drafts follow 1 (4 1 is older), 1 2, 9, and 3 4 1; an answer whose steps are not all
    known is left out."""
    prompt, output = [1, 2, 3, 4], [1, 2, 9, 3, 4, 1, 5]
    steps = {"num_spec_tokens": 2, "num_spec_steps": 4, "per_step_accepted": [0, 0, 2, 0]}
    none = Answer(range(9), (), {"num_spec_tokens": 3, "num_spec_steps": 0})
    assert by_repeated([Answer(prompt, output, steps), Answer(prompt, [*output, 5, 5], steps), none]) == {
        0: Acceptance(1, (1, 1)),
        1: Acceptance(1, (0, 0)),
        2: Acceptance(1, (0, 0)),
        3: Acceptance(1, (0, 0)),
    }
