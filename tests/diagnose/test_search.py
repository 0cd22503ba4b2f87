"""Causes are named by what helped, and only then: on simulated pairs, whose faults are known."""

from dataclasses import replace
from pathlib import Path

import pytest

from peagle_vllm.acceptance import Acceptance
from peagle_vllm.diagnose.interventions import Intervention, Setup, interventions, setup_of
from peagle_vllm.diagnose.prompts import read_prompts
from peagle_vllm.diagnose.search import LEAST_GAIN, diagnose, oddities
from peagle_vllm.heads.head import read_head
from peagle_vllm.heads.target import Target, Token, read_tokens, special_tokens
from tests.models import PEAGLE, TARGET

RIGHT = Setup(aux_layers=(2, 5, 7), mask_token_id=6, k=5)
DRAFTS = 400


def proposed(setup: Setup, trained_depth: int = 8, longest_prompt: int = 100) -> list[Intervention]:
    """What is tried on a setup of a known pair."""
    head = replace(read_head(PEAGLE), trained_depth=trained_depth)
    specials = [Token(6, "<|mask|>", "special"), Token(0, "<|pad|>", "special")]
    return list(interventions(setup, head, Target("t", 128, 512, 8), specials, True, longest_prompt))


def counted(drafts: int, *accepted: int) -> Acceptance:
    return Acceptance(drafts, drafts * len(accepted), sum(accepted), accepted)


def curve(share: float, k: int) -> Acceptance:
    """Each position is accepted in ``share`` of the drafts in which the one before was."""
    return counted(DRAFTS, *(round(DRAFTS * share**i) for i in range(1, k + 1)))


class Pair:
    """A simulated pair: right at RIGHT, and ``cost`` of each wrong thing comes off the share."""

    def __init__(self, cost: float = 0.3, share: float = 0.75):
        self.cost, self.share, self.measured = cost, share, 0

    def __call__(self, setup: Setup) -> Acceptance:
        self.measured += 1
        wrong = (setup.aux_layers != RIGHT.aux_layers) + (setup.mask_token_id != RIGHT.mask_token_id)
        wrong += not setup.chat_template
        return curve(self.share - self.cost * wrong, setup.k)


def causes(setup: Setup, pair: Pair, always: bool = False) -> list[str]:
    found = diagnose(setup, pair, proposed, always)
    for trial in found.causes:
        assert trial.gain >= LEAST_GAIN
        assert trial.after.length >= 1.15 * trial.before.length
    return [trial.intervention.kind for trial in found.causes]


def test_a_usual_curve_is_measured_once():
    pair = Pair()
    assert causes(RIGHT, pair) == []
    assert pair.measured == 1


def test_a_sound_pair_has_no_cause_even_when_everything_is_tried():
    pair = Pair()
    assert causes(RIGHT, pair, always=True) == []
    assert pair.measured > 4


@pytest.mark.parametrize(
    ("setup", "kind"),
    [
        (replace(RIGHT, aux_layers=(3, 6, 8)), "aux layers"),
        (replace(RIGHT, aux_layers=(1, 4, 6)), "aux layers"),
        (replace(RIGHT, mask_token_id=40), "mask token"),
        (replace(RIGHT, chat_template=False), "chat template"),
    ],
)
def test_a_fault_is_named(setup: Setup, kind: str):
    assert causes(setup, Pair()) == [kind]


def test_two_faults_are_both_named():
    setup = replace(RIGHT, aux_layers=(3, 6, 8), chat_template=False)
    assert sorted(causes(setup, Pair(cost=0.25))) == ["aux layers", "chat template"]


def test_what_helps_too_little_is_not_named():
    pair = Pair(cost=0.03, share=0.5)
    assert oddities(pair(RIGHT))
    assert causes(replace(RIGHT, mask_token_id=40), pair) == []


def test_a_head_that_is_just_poor_has_no_cause():
    assert causes(RIGHT, Pair(share=0.4)) == []


def test_a_smaller_k_is_tried_and_the_trained_depth_known():
    def setups(k: int, trained_depth: int) -> list[int]:
        return [i.setup.k for i in proposed(replace(RIGHT, k=k), trained_depth) if i.kind == "K"]

    assert (setups(1, 8), setups(8, 8), setups(16, 8), setups(16, 3)) == ([], [4], [8], [3])


def test_prompts_that_are_too_long():
    def measure(setup: Setup) -> Acceptance:
        return curve(0.75 if setup.prompt_tokens else 0.4, setup.k)

    found = diagnose(RIGHT, measure, lambda setup: proposed(setup, longest_prompt=4000))
    assert [trial.intervention.kind for trial in found.causes] == ["prompt length"]
    assert "prompt length" not in {i.kind for i in proposed(RIGHT)}


def test_few_drafts_tell_nothing():
    assert oddities(counted(29, 1, 0, 0)) == []
    assert len(oddities(counted(31, 10, 5, 1))) == 1


def test_the_likely_mask_token_comes_first():
    assert special_tokens(read_tokens(str(TARGET)))[0] == Token(6, "<|mask|>", "special")
    head = read_head(PEAGLE)
    assert setup_of(head, Target("t", 128, 512, 8), 5, True) == RIGHT


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{", ":2 is not valid JSON"),
        ('{"text": "x"}', ':2 holds neither "prompt" nor "messages"'),
        (
            '{"messages": [{"role": "assistant", "content": "x"}]}',
            ":2 ends with an answer, which may not be this target",
        ),
        ('{"messages": []}', ":2 holds neither"),
        ('{"messages": [{"role": "user"}]}', ":2 holds neither"),
    ],
)
def test_a_bad_prompt_is_named_by_its_line(line: str, error: str, tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"what is it?\n{line}\n")
    with pytest.raises(ValueError, match=error):
        read_prompts(path)


def test_prompts_of_every_form(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    chat = '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}'
    path.write_text(f'a\n\n{{"prompt": "b"}}\n{chat}\n')
    assert [[message["content"] for message in chat] for chat in read_prompts(path)] == [["a"], ["b"], ["s", "u"]]
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(path)
