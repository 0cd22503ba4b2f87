"""What a row of a prompt file holds: a conversation, in the forms that vLLM's and speculators' readers take."""

import re
from itertools import pairwise
from typing import Any

Messages = list[dict[str, str]]

TURNS = ("messages", "conversations", "conversation", "turns", "prompt", "input")  # of a row: lists of turns
TEXTS = ("prompt", "instruction", "question", "problem", "input", "text")  # of a row: a user's text
SYSTEM = ("system", "system_prompt")  # of a row, next to its turns
ADDED = ("input", "context")  # what an ``instruction`` is about
NO_TEXT = re.compile(  # keys of a row or a turn: media, tools, turns in no known form
    r"(image|audio|video)(s|_files|_url)?|multi_modal_data|tools|functions|tool_calls|function_call|tool_call_id|history"
)
ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
}
# What chat templates put around turns: ChatML, Llama 3 and 4, harmony, Phi, DeepSeek, Cohere; Gemma; Llama 2 and
# Mistral; and transcripts in plain words.
IN_A_TEMPLATE = re.compile(
    r"<[|\uff5c][\w\u2581]+[|\uff5c]>|<(start|end)_of_turn>|<\|turn>|<turn\|>"
    r"|\[/?(INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS)\]|<</?SYS>>"
    r"|^###? ?(Response|Assistant|Human):|^(?:Human|User): (?s:.*)\n\s*Assistant:|\bUSER: (?s:.*)\bASSISTANT:",
    re.MULTILINE,
)
NO_TEMPLATE = 'write its turns as {"messages": [{"role": "user", "content": "..."}]}: the target\'s template is added'


class UnusableRow(ValueError):
    """A row that holds no conversation in text: why, and how to fix it."""

    def __init__(self, reason: str, fix: str):
        super().__init__(f"{reason}; {fix}")
        self.reason = reason


def conversation(row: Any, *, with_answers: bool = True) -> Messages:
    """The turns of a row: {role, content} with the roles system, user and assistant.

    UnusableRow where it is no such row, uses tools or media, has no user's turn, or is in a chat template.

    Args:
        row: text, or an object as vLLM's and speculators' readers take it.
        with_answers: else what the assistant said is left out, whatever it is.
    """
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise UnusableRow(f"is {_kind(row)}", 'write text, or {"prompt": "..."}')
    row = row["body"] if isinstance(row.get("body"), dict) else row  # a line for ``vllm run-batch``
    _check_keys(row)
    system = [{"role": "system", "content": row[key]} for key in SYSTEM if row.get(key)]
    turns = [turn for turn in [*system, *_turns(row)] if with_answers or not _is_answer(turn)]
    messages = [turn for turn in map(_turn, turns) if turn["content"] or turn["role"] != "system"]
    for message in messages:
        text = message["content"]
        if match := IN_A_TEMPLATE.search(text):
            raise UnusableRow(f"is in a chat template already ({match[0].splitlines()[0][:40]})", NO_TEMPLATE)
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise UnusableRow("holds half a character (a lone surrogate)", "write it whole, or leave it out")
    if not any(message["role"] == "user" for message in messages):
        raise UnusableRow("has no turn of a user", "leave it out")
    return messages


def unanswered(messages: Messages) -> Messages:
    """A conversation up to the first turn of a user that has no answer, or without the answer at its end."""
    spoken = [at for at, message in enumerate(messages) if message["role"] != "system"]
    for at, following in pairwise(spoken):
        if messages[at]["role"] == messages[following]["role"] == "user":
            return messages[:following]
    end = max(at for at in spoken if messages[at]["role"] == "user")
    return messages if end == spoken[-1] else messages[: end + 1]


def _turns(row: dict[str, Any]) -> list[Any]:
    """The turns of a row as it has them; a text is one."""
    for key in TURNS:
        if isinstance(turns := row.get(key), list) and turns:
            is_user = key == "turns"  # MT-Bench's are texts, all of the user
            return [{"role": "user", "content": turn} if is_user and isinstance(turn, str) else turn for turn in turns]
    for key in TEXTS:
        if (text := row.get(key)) is not None:
            more = [row.get(key) for key in ADDED] if key == "instruction" and isinstance(text, str) else []
            added = [part for part in more if isinstance(part, str) and part.strip()]
            return [{"role": "user", "content": "\n\n".join([text, *added]) if added else text}]
    names = ", ".join(f'"{key}"' for key in list(row)[:6]) or "nothing"
    raise UnusableRow(f'has no text as "prompt" and no list of turns as "messages", but {names}', "write one of them")


def _role(turn: dict[str, Any]) -> Any:
    """The one of ``ROLES`` if it is known, else as it is."""
    name = turn["role"] if turn.get("role") is not None else turn.get("from")
    return ROLES.get(name.lower(), name) if isinstance(name, str) else name


def _is_answer(turn: Any) -> bool:
    return isinstance(turn, dict) and _role(turn) == "assistant" and not turn.get("tool_calls")


def _turn(turn: Any) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise UnusableRow(f"has a turn that is {_kind(turn)}", 'write {"role": "user", "content": "..."}')
    _check_keys(turn)
    role, content = _role(turn), turn["content"] if turn.get("content") is not None else turn.get("value")
    if role not in ROLES.values():
        raise UnusableRow(f"has a turn with the role {role!r}", "write system, user or assistant")
    if isinstance(content, list) and content:
        content = "\n".join(map(_part, content))  # as vLLM joins them
    if not isinstance(content, str):
        raise UnusableRow(f"has a turn of the {role} whose content is {_kind(content)}", "write text")
    if not content.strip() and role != "system":
        raise UnusableRow(f"has a turn of the {role} that is empty", "write text, or leave it out")
    return {"role": role, "content": content if content.strip() else ""}


def _part(part: Any) -> str:
    if isinstance(part, dict) and part.get("type", "text") in ("text", "input_text", "output_text"):
        part = part.get("text")
    if not isinstance(part, str):
        what = repr(part.get("type")) if isinstance(part, dict) else _kind(part)
        raise UnusableRow(f"has a part of a turn that is {what}", "only text is taken, leave it out")
    return part


def _check_keys(fields: dict[str, Any]) -> None:
    for key, value in fields.items():
        if NO_TEXT.fullmatch(str(key)) and value not in (None, "", "[]", "{}", [], {}):
            raise UnusableRow(f'has "{key}"', "only text is taken, leave it out")


def _kind(value: Any) -> str:
    """What JSON has there; no value, for rows are counted by reason."""
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", dict: "an object"}
    if value is None:
        return "null"
    return "an empty list" if value == [] else names.get(type(value), "a list")
