"""Which prompts are learned from and which are measured, as token ids."""

import json
import random
from pathlib import Path
from typing import NamedTuple, TypeVar

from peagle_tools.shared.conversations import Messages
from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.prompts import read_tokenizer, token_ids

HELD_OUT = 64  # prompts at most, and a fifth of few
MOST_RECORDED, LONGEST_RECORDED = 2_000, 4_096  # prompts; tokens of one
Prompt = TypeVar("Prompt", Messages, list[int])


class Prompts(NamedTuple):
    """Token ids of each prompt."""

    learn: list[list[int]]
    held_out: list[list[int]]  # measured, and nothing else


def divided(prompts: list[Prompt], held_out: list[Prompt] | None) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to learn from, and to measure with: some of them, where no others are given. None is in both."""
    mixed = random.Random(0).sample(prompts, len(prompts))  # a file may be sorted
    aside = mixed[: min(HELD_OUT, len(mixed) // 5)] if held_out is None else held_out
    return [prompt for prompt in mixed if prompt not in aside], aside


def read_tokens(target: str, prompts: list[Messages]) -> list[list[int]]:
    """Token ids of each prompt, in the target's chat template where it has one. ToolError without a tokenizer."""
    tokenizer = read_tokenizer(target)
    has_template = bool(getattr(tokenizer, "chat_template", None))
    return [token_ids(tokenizer, prompt, has_template) for prompt in prompts]


def read_records(folder: Path, vocab_size: int, longest: int) -> tuple[list[list[int]], int]:
    """The prompts that a server recorded, each once, and how many there were; of a chat the last prompt only.

    Args:
        vocab_size: of the target.
        longest: tokens that its engine takes; prompts beyond it or ``LONGEST_RECORDED`` are left out.

    Raises:
        ToolError: there are none, or a line is no record of this target. The last of a file may be a half one.
    """
    read = set()
    for file in sorted(folder.glob("*.jsonl")):
        *lines, _ = file.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            try:
                ids = json.loads(line)["prompt"]
                is_prompt = ids and all(type(token) is int and 0 <= token < vocab_size for token in ids)
            except (ValueError, KeyError, TypeError):
                is_prompt = False
            if not is_prompt:
                raise ToolError(f"{file}:{number} is no recorded prompt of this target; remove the line, or the file")
            read.add(tuple(ids))
    if not read:
        raise ToolError(f"{folder} holds no recorded prompt; serve with PEAGLE_VLLM_RECORD={folder}")
    short = sorted(ids for ids in read if len(ids) <= min(longest, LONGEST_RECORDED))
    if not short:
        most = min(longest, LONGEST_RECORDED)
        mend = "raise max_model_len in --engine, or lower --max-tokens"
        raise ToolError(f"{folder}: every recorded prompt is longer than {most} tokens; {mend}")
    following = [*short[1:], ()]  # what a chat goes on with comes right after it
    kept = [list(ids) for ids, after in zip(short, following, strict=True) if after[: len(ids)] != ids]
    return random.Random(0).sample(kept, min(len(kept), MOST_RECORDED)), len(read)
