"""A setup, and the single changes to it that have been seen to raise a low acceptance."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from peagle_vllm.heads.config import AUX_KEY, default_aux_layers, is_whole
from peagle_vllm.heads.files import HeadError
from peagle_vllm.heads.head import Head
from peagle_vllm.heads.rope import rope_parameters
from peagle_vllm.heads.target import Target, Token, read_tokens

MOST_MASK_TOKENS = 4
ROPE_THETAS = (10_000.0, 500_000.0, 1_000_000.0)  # that heads are trained with, whatever their config says
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id", "dspark_noise_token_id")


@dataclass(frozen=True)
class Setup:
    """How a pair is run. None: as the head's config has it."""

    aux_layers: tuple[int, ...]  # target layers that the head reads
    mask_token_id: int
    k: int  # draft tokens a step
    chat_template: bool = True  # whether prompts go through it
    norm_before_residual: bool = False
    rope: Mapping[str, Any] | None = None  # of the head, as transformers' rope_parameters


@dataclass(frozen=True)
class Intervention:
    """One change to a setup."""

    kind: str  # what is changed, such as "aux layers"
    change: str  # for people
    setup: Setup  # with the change
    fix: str  # what to do for good if it helps


def setup_of(head: Head, target: Target, k: int, chat_template: bool) -> Setup:
    """The pair as it would be served."""
    assert isinstance(head.mask_token_id, int)
    layers = tuple(sorted(head.aux_layer_ids or default_aux_layers(target.num_layers)))  # as vLLM sorts them
    norm = head.norms["norm_before_residual"]
    return Setup(layers, head.mask_token_id, k, chat_template, norm_before_residual=norm)


def interventions(
    setup: Setup, head: Head, target: Target, special_tokens: list[Token], has_template: bool
) -> Iterator[Intervention]:
    """Every change to try on ``setup``, the most likely first.

    Args:
        special_tokens: of the target's tokenizer, the likely mask tokens first.
        has_template: whether the tokenizer has a chat template.
    """

    def change(kind: str, text: str, fix: str, **fields: Any) -> Intervention:
        return Intervention(kind, text, replace(setup, **fields), fix)

    if not setup.chat_template and has_template:
        fix = "use the chat API, or apply the chat template to prompts before they are sent"
        yield change("chat template", "prompts through the chat template", fix, chat_template=True)
    for layers in _aux_layers(setup, target.num_layers):
        text = f"aux layers {list(layers)} for {list(setup.aux_layers)}"
        fix = f'set "{AUX_KEY}" to {list(layers)}: {head.config_file}'
        yield change("aux layers", text, fix, aux_layers=layers)
    for token_id, name in list(_mask_tokens(setup, head, special_tokens).items())[:MOST_MASK_TOKENS]:
        text = f"mask token {token_id}{f' ({name})' if name else ''} for {setup.mask_token_id}"
        fix = f'set "mask_token_id" to {token_id}: {head.config_file}'
        yield change("mask token", text, fix, mask_token_id=token_id)
    flipped = not setup.norm_before_residual
    fix = f'set "norm_before_residual" to {str(flipped).lower()}: {head.config_file}'
    yield change("norm_before_residual", f"norm_before_residual {flipped}", fix, norm_before_residual=flipped)
    yield from _ropes(setup, head, target, ROPE_THETAS)


def _ropes(setup: Setup, head: Head, target: Target, thetas: tuple[float, ...] = ()) -> Iterator[Intervention]:
    """The target's rotary embedding for the head's, theta and scaling each on its own; then other ``thetas``."""
    rope_of_head, its = dict(setup.rope or rope_of(head.served)), rope_of(target.config)
    if not rope_of_head:
        return
    theta = rope_of_head.pop("rope_theta")
    of_target = its.pop("rope_theta", None)
    trials = (
        [("rope theta", theta, of_target, rope_of_head | {"rope_theta": of_target}, ", the target's,")] if its else []
    )
    trials += [("rope scaling", rope_of_head, its, its | {"rope_theta": theta}, ", the target's,")] if its else []
    trials += [
        ("rope theta", theta, other, rope_of_head | {"rope_theta": other}, "") for other in thetas if other != of_target
    ]
    for kind, now, then, rope, whose in trials:
        if now != then:
            fix = f'set "rope_parameters" to {rope}: {head.layer_place}'
            yield Intervention(kind, f"{kind} {then}{whose} for {now}", replace(setup, rope=rope), fix)


def differences(setup: Setup, head: Head, target: Target, has_template: bool) -> Iterator[str]:
    """What the head's files have otherwise than its target's, a line each: hints, a head may have been trained so.

    Args:
        has_template: whether the target's tokenizer has a chat template.
    """
    for intervention in _ropes(setup, head, target):
        yield f"{intervention.change}: {head.layer_place}"
    eps, its_eps = head.served.get("rms_norm_eps"), target.config.get("rms_norm_eps")
    if its_eps is not None and eps != its_eps:
        yield f"rms_norm_eps is {eps}, the target's {its_eps}: {head.layer_place}"
    if not has_template:
        yield f"{target.name} has no chat template: prompts go raw; a head trained on chats needs that of its training"
    if head.folder and (head.folder / "tokenizer.json").exists():
        tokens, its = read_tokens(str(head.folder)), read_tokens(target.name)
        if other := [i for i in sorted(tokens.keys() & its.keys()) if tokens[i].text != its[i].text]:
            first = f"token {other[0]} is {tokens[other[0]].text!r}, {target.name} has {its[other[0]].text!r}"
            yield f"{first}: {head.name}/tokenizer.json; use the head that was trained for this target"


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's ``rope_parameters`` of a model, or none where they differ by layer, or are not known."""
    with suppress(HeadError):
        return rope_parameters(config, "", 10000.0) if config else {}
    return {}


def _aux_layers(setup: Setup, num_layers: int) -> list[tuple[int, ...]]:
    """All of them shifted by one (some trainers count a layer's output, some its input), and vLLM's default."""
    now = setup.aux_layers
    others = [tuple(i - 1 for i in now), tuple(i + 1 for i in now)]
    others += [default_aux_layers(num_layers)] if len(now) == 3 else []
    inside = [layers for layers in others if all(0 <= i <= num_layers for i in layers) and layers != now]
    return [layers for layers in dict.fromkeys(inside) if len(set(layers)) == len(layers)]


def _mask_tokens(setup: Setup, head: Head, special_tokens: list[Token]) -> Mapping[int, str | None]:
    """Other ids to try: those that the config names elsewhere, then special tokens."""
    named = (head.config.get(key) for key in MASK_KEYS)
    ids: dict[int, str | None] = {i: None for i in named if isinstance(i, int) and is_whole(i)}
    ids |= {token.id: token.text for token in special_tokens}
    return {i: text for i, text in ids.items() if i != setup.mask_token_id and 0 <= i < head.vocab_size}
