"""A setup, and the single changes to it that have been seen to mend a low acceptance."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from peagle_vllm.heads.config import AUX_KEY, default_aux_layers, is_whole
from peagle_vllm.heads.head import Head
from peagle_vllm.heads.target import Target, Token

Kind = Literal["chat template", "aux layers", "mask token", "K", "prompt length"]
LONG_PROMPT, SHORT_PROMPT = 512, 256  # tokens
MOST_MASK_TOKENS = 4
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id", "dspark_noise_token_id")


@dataclass(frozen=True)
class Setup:
    """How a pair is run."""

    aux_layers: tuple[int, ...]  # target layers that the head reads
    mask_token_id: int
    k: int  # draft tokens a step
    chat_template: bool = True  # whether prompts go through it
    prompt_tokens: int | None = None  # how much of the end of each prompt is kept; None: all


@dataclass(frozen=True)
class Intervention:
    """One change to a setup."""

    kind: Kind
    change: str  # for people
    setup: Setup  # with the change
    mend: str  # what to do for good if it helps


def setup_of(head: Head, target: Target, k: int, chat_template: bool) -> Setup:
    """The pair as it would be served."""
    assert isinstance(head.mask_token_id, int)
    return Setup(head.aux_layer_ids or default_aux_layers(target.num_layers), head.mask_token_id, k, chat_template)


def interventions(
    setup: Setup, head: Head, target: Target, special_tokens: list[Token], has_template: bool, longest_prompt: int
) -> Iterator[Intervention]:
    """Every change to try on ``setup``, the most likely first.

    Args:
        special_tokens: of the target's tokenizer, the likely mask tokens first.
        has_template: whether the tokenizer has a chat template.
        longest_prompt: in tokens.
    """

    def change(kind: Kind, text: str, mend: str, **fields: Any) -> Intervention:
        return Intervention(kind, text, replace(setup, **fields), mend)

    if not setup.chat_template and has_template:
        mend = "use the chat API, or apply the chat template to prompts before they are sent"
        yield change("chat template", "prompts through the chat template", mend, chat_template=True)
    for layers in _aux_layers(setup, target.num_layers):
        text = f"aux layers {list(layers)} for {list(setup.aux_layers)}"
        mend = f'set "{AUX_KEY}" to {list(layers)}: {head.config_file}'
        yield change("aux layers", text, mend, aux_layers=layers)
    for token_id, name in list(_mask_tokens(setup, head, special_tokens).items())[:MOST_MASK_TOKENS]:
        text = f"mask token {token_id}{f' ({name})' if name else ''} for {setup.mask_token_id}"
        mend = f'set "mask_token_id" to {token_id}: {head.config_file}'
        yield change("mask token", text, mend, mask_token_id=token_id)
    smaller = min(head.trained_depth or setup.k, (setup.k + 1) // 2)
    if smaller < setup.k:
        yield change("K", f"K = {smaller} for {setup.k}", f"set num_speculative_tokens to {smaller}", k=smaller)
    if setup.prompt_tokens is None and longest_prompt > LONG_PROMPT:
        text = f"only the last {SHORT_PROMPT} tokens of each prompt"
        mend = "use a head that was trained on prompts as long as these"
        yield change("prompt length", text, mend, prompt_tokens=SHORT_PROMPT)


def _aux_layers(setup: Setup, num_layers: int) -> list[tuple[int, ...]]:
    """All of them moved by one (some trainers count a layer's output, some its input), and vLLM's default."""
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
