"""Which prompts are learned from and which are measured, as token ids, with the answers that are given."""

import random
from typing import Any, NamedTuple

from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.prompts import Messages, token_ids
from peagle_vllm.heads.files import one_line

HELD_OUT = 64  # prompts


class Prompts(NamedTuple):
    """Token ids of each prompt."""

    learn: list[list[int]]
    held_out: list[list[int]]  # measured, and nothing else
    answers: list[list[int]] | None = None  # to ``learn``, the target's own; None: it gives them


def divided(prompts: list[Messages], held_out: list[Messages] | None) -> tuple[list[Messages], list[Messages]]:
    """Prompts to learn from, and to measure with: HELD_OUT of them, where no others are given. None is in both."""
    mixed = random.Random(0).sample(prompts, len(prompts))  # a file may be sorted
    aside = mixed[:HELD_OUT] if held_out is None else held_out
    known = [_question(prompt) for prompt in aside]
    return [prompt for prompt in mixed if _question(prompt) not in known], aside


def _question(prompt: Messages) -> Messages:
    return prompt[:-1] if prompt[-1]["role"] == "assistant" else prompt


def read_tokens(target: str, prompts: list[Messages], max_tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of each prompt, in the target's chat template where it has one, and of at most ``max_tokens`` of its
    answer, none where it ends without one. ToolError without a tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise ToolError(f"{target} has no tokenizer that can be read ({one_line(error)}); name its folder") from None
    questions = [_question(prompt) for prompt in prompts]
    answers = ["".join(message["content"] for message in p[len(q) :]) for p, q in zip(prompts, questions, strict=True)]
    answer_ids = [tokenizer.encode(answer, add_special_tokens=False)[:max_tokens] for answer in answers]
    has_template = bool(getattr(tokenizer, "chat_template", None))
    return [token_ids(tokenizer, question, has_template) for question in questions], answer_ids
