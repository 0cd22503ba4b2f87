"""Causes are named by what helped, and only then: on simulated pairs, whose faults are known."""

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from peagle_tools.diagnose.diagnosis_report import show
from peagle_tools.diagnose.interventions import Intervention, Setup, interventions, setup_of
from peagle_tools.diagnose.search import Measured, diagnose, irregularities
from peagle_tools.shared.acceptance import Acceptance
from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.prompts import read_tokenizer, templated
from peagle_vllm.heads.head import read_head
from peagle_vllm.heads.target import Target, Token, read_target, read_tokens, special_tokens
from tests.heads.writers import speculators, vllm
from tests.support.dialects import Written
from tests.support.models import PEAGLE, TARGET

ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
RIGHT = Setup(aux_layers=(2, 5, 7), mask_token_id=6, k=5)
DRAFTS = 400
PROMPTS = 24


def proposed(setup: Setup) -> list[Intervention]:
    specials = [Token(6, "<|mask|>", "special"), Token(0, "[/pad]", "special")]  # no markup of rich
    return list(interventions(setup, read_head(PEAGLE), read_target(str(TARGET)), specials))


def curve(share: float, k: int) -> Measured:
    """Each position is accepted in ``share`` of the drafts in which the one before was; answers scatter by half."""
    counts = Acceptance(DRAFTS, tuple(round(DRAFTS * share**i) for i in range(1, k + 1)))
    return Measured(counts, tuple(counts.length * (0.75 + 0.5 * i / PROMPTS) for i in range(PROMPTS)), {})


class Simulated:
    """A simulated pair: right at RIGHT with ``rope``, and ``cost`` of each wrong thing comes off the share."""

    def __init__(self, cost: float = 0.3, share: float = 0.75, rope: dict[str, Any] = ROPE):
        self.cost, self.share, self.rope, self.measured = cost, share, rope, 0

    def __call__(self, setup: Setup) -> Measured:
        self.measured += 1
        wrong = (setup.aux_layers != RIGHT.aux_layers) + (setup.mask_token_id != RIGHT.mask_token_id)
        wrong += setup.norm_before_residual + ((setup.rope or ROPE) != self.rope)
        return curve(self.share - self.cost * wrong, setup.k)


def cause(setup: Setup, pair: Callable[[Setup], Measured]) -> str | None:
    trial = diagnose(pair, setup, proposed(setup)).cause
    return trial.intervention.kind if trial else None


def test_a_sound_pair_has_no_cause_though_everything_is_tried():
    pair = Simulated()
    assert cause(RIGHT, pair) is None
    assert pair.measured == 1 + len(proposed(RIGHT)) > 7


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"aux_layers": (1, 4, 6)}, "aux layers"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"rope": {**ROPE, "rope_theta": 500.0}}, "rope theta"),
        ({"rope": {**ROPE, "rope_type": "linear", "factor": 8.0}}, "rope scaling"),
        ({"mask_token_id": 40}, "mask token"),
    ],
)
def test_a_fault_is_named(wrong: dict[str, Any], kind: str):
    assert cause(replace(RIGHT, **wrong), Simulated(cost=0.25)) == kind


@pytest.mark.parametrize("theta", [500_000.0, 1_000_000.0])
def test_a_theta_of_training_that_neither_config_names(theta: float):
    """Heads are published with their target's theta and were trained with another one."""
    rope = ROPE | {"rope_theta": theta}
    cause = diagnose(Simulated(rope=rope), RIGHT, proposed(RIGHT)).cause
    assert cause
    assert cause.intervention.change == f"rope theta {theta} for 10000.0"
    assert f'"rope_theta": {theta}' in cause.intervention.fix


@pytest.mark.parametrize(("cost", "share", "is_part"), [(0.3, 0.75, False), (0.12, 0.5, True)])
def test_a_part_of_the_cause_is_told_as_a_part(cost: float, share: float, is_part: bool):
    wrong = replace(RIGHT, mask_token_id=40)
    diagnosis = diagnose(Simulated(cost, share), wrong, proposed(wrong))
    console = Console(width=80, record=True, file=io.StringIO(), markup=False)
    show(console, RIGHT, diagnosis)
    assert diagnosis.cause and ("diagnose again" in console.export_text()) is is_part


@pytest.mark.parametrize(("scatter", "prompts", "named"), [(2.0, 24, None), (0.2, 24, "mask token"), (0.2, 2, None)])
def test_noise_is_not_named(scatter: float, prompts: int, named: str | None):
    """The same gain, when answers differ more or less in how much they gain, or are too few."""

    def measure(setup: Setup) -> Measured:
        right = setup.mask_token_id == 6
        lengths = tuple(3 + right * (0.6 + scatter * (-1) ** i) for i in range(prompts))
        return Measured(curve(0.75 if right else 0.65, setup.k).curve, lengths, {})

    assert cause(replace(RIGHT, mask_token_id=40), measure) == named


def test_the_first_low_position_gives_the_meaning():
    assert "look at the prompts" in irregularities(Acceptance(100, (40, 10, 2)))[-1]
    assert "1 is fine, the rest decays: look at the mask inputs" in irregularities(Acceptance(100, (80, 20, 2)))[-1]
    assert "the last positions decay" in irregularities(Acceptance(100, (80, 60, 10)))[-1]
    assert irregularities(Acceptance(100, (80, 60, 50))) == []
    assert irregularities(Acceptance(29, (1, 0, 0))) == []  # too few drafts to judge


def test_the_likely_mask_token_comes_first():
    assert special_tokens(read_tokens(str(TARGET)))[0] == Token(6, "<|mask|>", "special")
    assert setup_of(read_head(PEAGLE), Target("t", 128, 512, 8), 5) == RIGHT


@pytest.mark.parametrize(("head", "key"), [(vllm(), "rope_scaling"), (speculators(), "rope_parameters")])
def test_the_rope_that_is_varied_and_fixed_is_the_served_one(head: Written, key: str, tmp_path: Path):
    """Where a config has both objects."""
    head.layer_config.update({"rope_parameters": ROPE, "rope_scaling": ROPE, key: ROPE | {"rope_theta": 5e5}})
    tried = interventions(RIGHT, read_head(head.save(tmp_path)), read_target(str(TARGET)), [])
    changes = {intervention.change: intervention.fix for intervention in tried if intervention.kind == "rope theta"}
    assert "rope theta 10000.0, the target's, for 500000.0" in changes
    assert all(fix.startswith(f'set "{key}" to') for fix in changes.values())


def test_a_tokenizer_that_cannot_be_parsed_is_one_line(tmp_path: Path):
    shutil.copytree(TARGET, tmp_path, dirs_exist_ok=True)
    text = json.loads((tmp_path / "tokenizer.json").read_text())
    text["model"]["type"] = "of a newer library"
    (tmp_path / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(ToolError, match=r"has no tokenizer that can be read \(.*\); name its folder"):
        read_tokenizer(str(tmp_path))


def test_a_chat_template_that_refuses_a_prompt_is_one_line():
    """And without one the text itself is sent."""
    tokenizer = read_tokenizer(str(TARGET))
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ToolError, match=r"the chat template refuses 'be brief' \(no system role\)"):
        templated(tokenizer, [{"role": "system", "content": "be brief"}], tokenize=True)
    tokenizer.chat_template = None
    assert templated(tokenizer, [{"role": "user", "content": "hi"}], tokenize=True) == tokenizer.encode("hi")
