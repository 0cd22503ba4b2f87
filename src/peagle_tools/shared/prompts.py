"""Prompts: those of a file, or short questions of several kinds."""

import json
from pathlib import Path
from typing import Any

from peagle_tools.shared.errors import ToolError
from peagle_vllm.heads.files import one_line

Messages = list[dict[str, str]]

PROMPTS = Path(__file__).with_name("prompts.txt").read_text(encoding="utf-8").splitlines()


def read_prompts(path: Path) -> list[Messages]:
    """Prompts from a file, one a line: text, or JSON with ``prompt`` or ``messages``.

    Raises:
        ToolError: the file cannot be read or is empty, or a line is none of these, or ends with an answer.
    """
    conversations: list[Messages] = []
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ToolError(f"{path} cannot be read ({reason})") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{path}:{number}"
            conversations.append(_messages(line, place))
            if conversations[-1][-1]["role"] == "assistant":
                raise ToolError(f"{place} ends with an answer; leave it out, the target answers")
    if not conversations:
        raise ToolError(f"{path} holds no prompt; write one a line")
    return conversations


def read_tokenizer(target: str) -> Any:
    """The target's tokenizer. Raises ToolError where it has none that can be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise ToolError(f"{target} has no tokenizer that can be read ({one_line(error)}); name its folder") from None


def token_ids(tokenizer: Any, messages: Messages, chat_template: bool) -> list[int]:
    """Of a prompt, through the tokenizer's chat template or raw."""
    if chat_template:
        try:
            return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # a template raises what it likes
            begin = messages[0]["content"][:40]
            raise ToolError(f"the chat template refuses {begin!r} ({one_line(error)}); leave this prompt out") from None
    return tokenizer.encode("\n".join(message["content"] for message in messages))


def _messages(line: str, place: str) -> Messages:
    try:
        entry: Any = json.loads(line) if line.lstrip().startswith("{") else {"prompt": line}
    except ValueError:
        raise ToolError(f'{place} is not valid JSON; write text, or {{"prompt": "..."}}') from None
    if isinstance(entry.get("prompt"), str):
        return [{"role": "user", "content": entry["prompt"]}]
    messages = entry.get("messages")
    valid = isinstance(messages, list) and messages and all(_is_message(message) for message in messages)
    if not valid:
        raise ToolError(f'{place} holds neither "prompt" nor "messages"; write one of them')
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))
