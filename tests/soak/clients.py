"""Clients that send the soak's traffic at once, and what became of each request."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.soak.traffic import Ask

PATIENCE = 180  # seconds without a byte from the server; a request that waits longer is stuck
PATIENT = aiohttp.ClientTimeout(total=None, sock_read=PATIENCE)
Answer = tuple[str | None, str | None, int]  # text, why it finished, output tokens


@dataclass
class Tally:
    """What all clients saw, and sent."""

    asked: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)  # answered, refused, left, stuck, failed
    choices: int = 0  # finished ones
    prompt_tokens: int = 0  # of answered requests
    output_tokens: int = 0
    compared: int = 0
    wrong: list[str] = field(default_factory=list)


async def send(session: aiohttp.ClientSession, ask: Ask) -> tuple[str, list[Answer], Mapping[str, int]]:
    """Send one request. How it ended, the answer's choices, its usage.

    Raises:
        aiohttp.ClientError, ValueError: the connection broke, or the stream says that the server failed.
        TimeoutError: nothing came for PATIENCE seconds.
    """
    sent = {"data": ask.body} if isinstance(ask.body, bytes) else {"json": ask.body}
    headers = {"Content-Type": "application/json"}
    waits = None if ask.leaves is None or (ask.stream and ask.leaves >= 0) else abs(ask.leaves) / 100
    try:
        async with asyncio.timeout(waits), session.post(ask.path, headers=headers, **sent) as response:
            if response.status != 200:
                return str(response.status), [], {}
            if not ask.stream:
                return "answered", *_whole(await response.json())
            return await _streamed(response, ask)
    except TimeoutError:
        if waits is None:
            raise
        return "left", [], {}


def _text(choice: Mapping[str, Any]) -> str | None:
    message = choice.get("message", choice.get("delta"))
    return choice.get("text") if message is None else message.get("content")


def _whole(answer: Mapping[str, Any]) -> tuple[list[Answer], Mapping[str, int]]:
    usage = answer["usage"]
    return [(_text(c), c["finish_reason"], usage["completion_tokens"]) for c in answer["choices"]], usage


async def _streamed(response: aiohttp.ClientResponse, ask: Ask) -> tuple[str, list[Answer], Mapping[str, int]]:
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage: Mapping[str, int] = {}
    pieces = 0
    async for line in response.content:
        data = line.decode().removeprefix("data: ").strip()
        if not data or data == "[DONE]":
            continue
        piece = json.loads(data)
        if "error" in piece:
            raise ValueError(f"the stream ends with {data[:200]}")
        for choice in piece["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + (_text(choice) or "")
            if choice["finish_reason"]:
                reasons[index] = choice["finish_reason"]
        usage = piece.get("usage") or usage
        pieces += 1
        if ask.leaves is not None and 0 <= ask.leaves <= pieces:
            response.close()
            return "left", [], {}
    if not usage:
        raise ValueError("the stream ends early")
    return "answered", [(texts[i], reasons.get(i), usage["completion_tokens"]) for i in sorted(texts)], usage


async def client(url: str, asks: Iterable[Ask], right: Mapping[int, Answer], tally: Tally, until: float) -> None:
    """One client: a request after the other, until the loop's clock says ``until``."""
    async with aiohttp.ClientSession(url, timeout=PATIENT) as session:
        for ask in asks:
            if asyncio.get_running_loop().time() > until:
                return
            tally.asked[ask.kind] += 1
            try:
                note(tally, ask, *await send(session, ask), right)
            except TimeoutError:
                note(tally, ask, "stuck", [], {}, right)
            except (aiohttp.ClientError, ValueError) as error:
                note(tally, ask, f"failed: {type(error).__name__}: {error}", [], {}, right)


def note(
    tally: Tally, ask: Ask, ended: str, answers: list[Answer], usage: Mapping[str, int], right: Mapping[int, Answer]
) -> None:
    """Add one request to the tally; what should not be goes to ``tally.wrong``."""
    if ask.refused and ended.startswith("4"):
        ended = "refused"
    elif ended not in ("answered", "left") or ask.refused:
        tally.wrong.append(f"{ended}: {ask.kind} {str(ask.body)[:200]}")
        ended = "stuck" if ended == "stuck" else "failed"
    tally.ended[ended] += 1
    tally.choices += len(answers)
    tally.prompt_tokens += usage.get("prompt_tokens", 0)
    tally.output_tokens += usage.get("completion_tokens", 0)
    if answers and ask.known is not None:
        tally.compared += 1
        if answers != [right[ask.known]]:
            tally.wrong.append(f"question {ask.known} ({ask.kind}): {answers}, unspeculated {right[ask.known]}")
