"""Which prompts are learned from and which are measured, as token ids."""

import random
from typing import NamedTuple

from peagle_tools.shared.conversations import Messages
from peagle_tools.shared.prompts import read_tokenizer, token_ids

HELD_OUT = 64  # prompts at most, and a fifth of few


class Prompts(NamedTuple):
    """Token ids of each prompt."""

    learn: list[list[int]]
    held_out: list[list[int]]  # measured, and nothing else


def divided(prompts: list[Messages], held_out: list[Messages] | None) -> tuple[list[Messages], list[Messages]]:
    """Prompts to learn from, and to measure with: some of them, where no others are given. None is in both."""
    mixed = random.Random(0).sample(prompts, len(prompts))  # a file may be sorted
    aside = mixed[: min(HELD_OUT, len(mixed) // 5)] if held_out is None else held_out
    return [prompt for prompt in mixed if prompt not in aside], aside


def read_tokens(target: str, prompts: list[Messages]) -> list[list[int]]:
    """Token ids of each prompt, in the target's chat template where it has one. ToolError without a tokenizer."""
    tokenizer = read_tokenizer(target)
    has_template = bool(getattr(tokenizer, "chat_template", None))
    return [token_ids(tokenizer, prompt, has_template) for prompt in prompts]
