"""Short questions of several kinds, and prompts as a target reads them."""

from pathlib import Path
from typing import Any

from peagle_tools.shared.conversations import Messages
from peagle_tools.shared.errors import ToolError
from peagle_vllm.heads.files import one_line

PROMPTS = Path(__file__).with_name("prompts.txt").read_text(encoding="utf-8").splitlines()


def read_tokenizer(target: str, *, trust_remote_code: bool = False) -> Any:
    """The target's tokenizer. Raises ToolError where it has none that can be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(target, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raises what it likes
        raise ToolError(f"{target} has no tokenizer that can be read ({one_line(error)}); name its folder") from None


def templated(tokenizer: Any, messages: Messages, *, tokenize: bool) -> Any:
    """A prompt in the tokenizer's chat template, raw where it has none, with special tokens: token ids, or the text."""
    if not getattr(tokenizer, "chat_template", None):  # not every class of transformers knows the word
        ids = tokenizer.encode("\n".join(message["content"] for message in messages))
        return ids if tokenize else tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=tokenize, return_dict=False)
    except Exception as error:  # a template raises what it likes
        begin = messages[0]["content"][:40]
        raise ToolError(f"the chat template refuses {begin!r} ({one_line(error)}); leave this prompt out") from None
