"""Which prompts are learned from and which are measured, as token ids."""

import random
from typing import NamedTuple

from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.prompts import Messages, token_ids
from peagle_vllm.heads.files import one_line

HELD_OUT = 64  # prompts


class Prompts(NamedTuple):
    """Token ids of each prompt."""

    learn: list[list[int]]
    held_out: list[list[int]]  # measured, and nothing else


def divided(prompts: list[Messages], held_out: list[Messages] | None) -> tuple[list[Messages], list[Messages]]:
    """Prompts to learn from, and to measure with: HELD_OUT of them, where no others are given. None is in both."""
    mixed = random.Random(0).sample(prompts, len(prompts))  # a file may be sorted
    aside = mixed[:HELD_OUT] if held_out is None else held_out
    return [prompt for prompt in mixed if prompt not in aside], aside


def read_tokens(target: str, prompts: list[Messages]) -> list[list[int]]:
    """Token ids of each prompt, in the target's chat template where it has one. ToolError without a tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise ToolError(f"{target} has no tokenizer that can be read ({one_line(error)}); name its folder") from None
    has_template = bool(getattr(tokenizer, "chat_template", None))
    return [token_ids(tokenizer, prompt, has_template) for prompt in prompts]
