"""A setup, and the single changes to it that have been seen to raise a low acceptance."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from peagle_vllm.heads.config import AUX_KEY, default_aux_layers
from peagle_vllm.heads.fields import rope_of_head
from peagle_vllm.heads.files import HeadError
from peagle_vllm.heads.head import Head
from peagle_vllm.heads.rope import rope_parameters
from peagle_vllm.heads.target import Target, Token

MOST_MASK_TOKENS = 4
ROPE_THETAS = (10_000.0, 500_000.0, 1_000_000.0)  # that heads are trained with, whatever their config says


@dataclass(frozen=True)
class Setup:
    """How a pair is run. None: as the head's config has it."""

    aux_layers: tuple[int, ...]  # target layers that the head reads
    mask_token_id: int
    k: int  # draft tokens a step
    norm_before_residual: bool = False
    rope: Mapping[str, Any] | None = None  # of the head, as transformers' rope_parameters


@dataclass(frozen=True)
class Intervention:
    kind: str  # what is changed, such as "aux layers"
    change: str  # for people
    setup: Setup  # with the change
    fix: str  # what to do for good if it helps


def setup_of(head: Head, target: Target, k: int) -> Setup:
    """The pair as it would be served."""
    assert isinstance(head.mask_token_id, int)
    layers = tuple(sorted(head.aux_layer_ids or default_aux_layers(target.num_layers)))  # as vLLM sorts them
    return Setup(layers, head.mask_token_id, k, head.norms["norm_before_residual"])


def interventions(setup: Setup, head: Head, target: Target, special_tokens: list[Token]) -> Iterator[Intervention]:
    """Every change to try on ``setup``, the most likely first.

    Args:
        special_tokens: of the target's tokenizer, the likely mask tokens first.
    """

    def change(kind: str, text: str, key: str, value: Any, place: str, **fields: Any) -> Intervention:
        return Intervention(kind, text, replace(setup, **fields), f'set "{key}" to {json.dumps(value)}: {place}')

    place = head.config_file
    for layers in _aux_layers(setup, target.num_layers):
        text = f"aux layers {list(layers)} for {list(setup.aux_layers)}"
        yield change("aux layers", text, AUX_KEY, layers, place, aux_layers=layers)
    others = [token for token in special_tokens if token.id != setup.mask_token_id and token.id < head.vocab_size]
    for token in others[:MOST_MASK_TOKENS]:
        text = f"mask token {token.id} ({token.text}) for {setup.mask_token_id}"
        yield change("mask token", text, "mask_token_id", token.id, place, mask_token_id=token.id)
    norm, flipped = "norm_before_residual", not setup.norm_before_residual
    yield change(norm, f"{norm} {flipped}", norm, flipped, place, norm_before_residual=flipped)
    target_rope: dict[str, Any] = {}  # where it differs by layer, or is not known
    with suppress(HeadError):
        target_rope = rope_parameters(target.config, "", 10000.0)
    key = "rope_scaling" if head.served.get("rope_scaling") and not head.is_speculators else "rope_parameters"
    for kind, text, rope in _ropes(dict(setup.rope or rope_of_head(head)), target_rope):
        yield change(kind, text, key, rope, head.layer_place, rope=rope)


def _ropes(rope: dict[str, Any], target_rope: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Kind, text and ``rope_parameters``: the target's theta, its scaling, and other thetas."""
    theta, target_theta = rope.pop("rope_theta"), target_rope.pop("rope_theta", None)
    if target_theta not in (None, theta):
        text = f"rope theta {target_theta}, the target's, for {theta}"
        yield "rope theta", text, rope | {"rope_theta": target_theta}
    if target_rope and target_rope != rope:
        text = f"rope scaling {target_rope}, the target's, for {rope}"
        yield "rope scaling", text, target_rope | {"rope_theta": theta}
    for other in ROPE_THETAS:
        if other not in (theta, target_theta):
            yield "rope theta", f"rope theta {other} for {theta}", rope | {"rope_theta": other}


def _aux_layers(setup: Setup, num_layers: int) -> list[tuple[int, ...]]:
    """All of them shifted by one (some trainers count a layer's output, some its input), and vLLM's default."""
    now = setup.aux_layers
    others = [tuple(i - 1 for i in now), tuple(i + 1 for i in now)]
    others += [default_aux_layers(num_layers)] * (len(now) == 3)
    return [layers for layers in dict.fromkeys(others) if layers != now and all(0 <= i <= num_layers for i in layers)]
