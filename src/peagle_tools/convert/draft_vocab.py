"""``--draft-vocab``: which draft tokens a smaller head keeps, and how much text they make up."""

import re
import string
from typing import Any

import numpy as np

from peagle_tools.shared.conversations import Messages
from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.prompts import read_tokenizer
from peagle_vllm.heads.convert import OUTPUT
from peagle_vllm.heads.files import SELECTOR
from peagle_vllm.heads.head import Head, target_ids

EVERY = 10  # of so many texts one is counted for coverage, and chooses nothing then
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a token of SentencePiece's byte fallback


def choose(head: Head, target: str, size: int, conversations: list[Messages]) -> tuple[np.ndarray, float]:
    """The special tokens, single bytes and digits, then the tokens that the texts hold most, then low ids.

    ToolError where the head cannot be trimmed, or not to ``size``.

    Args:
        target: names the tokenizer.
        size: tokens to keep.
        conversations: where they have answers, only these count.

    Returns:
        int64 [draft vocabulary] draft ids to keep, ascending; and the share of the held-out texts' tokens that can be
        drafted, of tokens that the other texts choose.
    """
    other = "name the head it was made from"
    if head.config.get(SELECTOR) is not None:
        raise ToolError(f"{head.name} has a selector, which fits no other vocabulary; {other}")
    if head.is_quantized:
        raise ToolError(f"{head.name} is quantized; {other}")
    if OUTPUT not in head.tensors:
        what = f"{head.name} has no lm_head of its own, so it drafts all of the target's"
        raise ToolError(f"{what}; leave --draft-vocab out")
    if size >= head.draft_vocab_size:
        raise ToolError(f"--draft-vocab is {size}, {head.name} drafts {head.draft_vocab_size} tokens; give fewer")
    tokenizer, ids = read_tokenizer(target), target_ids(head)
    needed = needed_ids(tokenizer)
    if size < (least := int(np.isin(ids, needed).sum())):
        raise ToolError(f"--draft-vocab is {size}, but {least} special tokens, bytes and digits are kept; give more")
    texts = [message["content"] for turns in conversations for message in turns if message["role"] == "assistant"]
    texts = texts or [message["content"] for turns in conversations for message in turns]
    held_out = _counts(tokenizer, texts[::EVERY], head.vocab_size)
    others = _counts(tokenizer, [text for i, text in enumerate(texts) if i % EVERY], head.vocab_size)
    kept = ranked(held_out + others, ids, needed)[:size]
    chosen = ids[ranked(others, ids, needed)[:size]]
    return np.sort(kept), float(held_out[chosen].sum() / max(held_out.sum(), 1))


def needed_ids(tokenizer: Any) -> list[int]:
    """Token ids that any text may need: special tokens, what stands for a single byte, and digits."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = {*ByteLevel.alphabet(), *string.digits}
    pieces = (i for text, i in tokenizer.get_vocab().items() if text in letters or BYTE.fullmatch(text))
    return sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder, *pieces})


def ranked(counts: np.ndarray, ids: np.ndarray, needed: list[int]) -> np.ndarray:
    """[draft vocabulary] draft ids, the ones to keep first; of equals the lower id, which is the commoner token in
    vocabularies made by merging.

    Args:
        counts: [target vocabulary] how often the texts hold each token.
        ids: [draft vocabulary] target id of each draft id.
    """
    number = counts[ids]
    number[np.isin(ids, needed)] = counts.max() + 1
    return np.argsort(-number, kind="stable")


def _counts(tokenizer: Any, texts: list[str], vocab_size: int) -> np.ndarray:
    """[target vocabulary] how often the texts hold each token."""
    ids = [i for row in tokenizer(texts, add_special_tokens=False)["input_ids"] for i in row] if texts else []
    return np.bincount(np.asarray(ids, np.int64), minlength=vocab_size)[:vocab_size]
