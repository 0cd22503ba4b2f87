"""What the soak's clients send: greedy questions whose answers are known, sampled ones, and requests that are wrong."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.models import heldout

MODEL = "tiny-llama"
MAX_MODEL_LEN = 512
VOCAB = 512
K = 5
JSON_OBJECT = "JSON object"
KINDS = "completion", "completion", "chat", "chat", "stop", "schema", "long", "short", "to the end", "echo", JSON_OBJECT
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["alpha", "beta"]}, "ready": {"type": "boolean"}},
    "required": ["name", "ready"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Ask:
    """One request."""

    kind: str  # for the report
    path: str
    body: dict[str, Any] | bytes = field(repr=False)  # JSON, or bytes that are to be sent as they are
    known: int | None = None  # number of the greedy question, whose answer is compared
    stream: bool = False  # whether the answer comes in pieces
    # The client goes away after so many pieces, or, not streaming or below 0, so many hundredths of a second.
    leaves: int | None = None
    refused: bool = False  # the server must refuse it, with a status from 400 to 499


def greedy_questions(count: int) -> list[Ask]:
    """Questions of which each has one right answer."""
    prompts, rng = heldout(), random.Random(0)
    questions = []
    for number in range(count):
        kind = rng.choice(KINDS)
        text = " ".join(rng.choices(prompts, k=rng.randint(1, 3)))
        body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": rng.choice((4, 16, 48, 96))}
        path = COMPLETIONS
        if kind in ("chat", "schema", JSON_OBJECT):
            path, body["messages"] = CHAT, [{"role": "user", "content": text[:300]}]
        elif kind in ("long", "to the end"):
            tokens = MAX_MODEL_LEN - rng.randint(1, 24) if kind == "to the end" else rng.randint(150, 400)
            body["prompt"] = [rng.randrange(8, VOCAB) for _ in range(tokens)]
            body["max_tokens"] = min(MAX_MODEL_LEN - tokens, 40)
            body["ignore_eos"] = True
        else:
            body["prompt"] = text[: 3 if kind == "short" else 400]
        if kind == "schema":
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
        if kind == JSON_OBJECT:
            body["response_format"] = {"type": "json_object"}
        if kind == "echo":
            body["echo"] = True
        if kind == "stop":
            body["stop"] = [rng.choice(("e", "self", "\n", " the", "()"))]
        questions.append(Ask(kind, path, body, known=number))
    return questions


def traffic(seed: int, known: list[Ask], prompts: list[str], filtered: bool) -> Iterator[Ask]:
    """An endless mixture for one client, decided by its seed: of 64, 30 ask for JSON objects alone (vLLM 27969).

    Args:
        filtered: some requests ask for top_p or top_k; Triton's interpreter cannot run vLLM's kernel for them.
    """
    rng = random.Random(seed)
    objects = [ask for ask in known if ask.kind == JSON_OBJECT]
    while True:
        if seed * 30 % 64 < 30:
            yield rng.choice(objects)
            continue
        share = rng.random()
        if share < 0.12:
            yield wrong(rng)
            continue
        ask = rng.choice(known) if share < 0.75 else sampled(rng, prompts, filtered)
        assert isinstance(ask.body, dict)
        stream = rng.random() < 0.5
        leaves = rng.choice((-1, -3, 0, 1, 2, 4, 9)) if rng.random() < 0.15 else None
        body = ask.body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})
        yield Ask(ask.kind, ask.path, body, ask.known, stream, leaves)


def sampled(rng: random.Random, prompts: list[str], filtered: bool) -> Ask:
    body: dict[str, Any] = {"model": MODEL, "prompt": rng.choice(prompts), "max_tokens": rng.randint(1, 64)}
    body |= {"temperature": rng.choice((0.2, 0.7, 1.0, 1.5))}
    # No seeds: on V1 without a GPU a seeded prompt in chunks ends the engine, "CPU Generator does not use offset".
    filters = ({"top_p": 0.8}, {"top_k": 5}) if filtered else ()
    body |= rng.choice(({}, {"logprobs": 2}, {"presence_penalty": 1.0}, *filters))
    if rng.random() < 0.4:
        return Ask("several choices", COMPLETIONS, body | {"n": rng.randint(2, 4)})
    return Ask("sampled", COMPLETIONS, body)


def wrong(rng: random.Random) -> Ask:
    """A request that no server may answer."""
    prompt = {"model": MODEL, "prompt": "def f(", "max_tokens": 8}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no"}}}
    prompts = ([-5], [VOCAB + 5] * 9, [9] * (MAX_MODEL_LEN + 1), "word " * 400_000)
    bodies: list[tuple[str, dict[str, Any] | bytes]] = [
        (COMPLETIONS, b'{"model": "tiny-llama", '),
        *((COMPLETIONS, prompt | {"prompt": value}) for value in prompts),
        (COMPLETIONS, prompt | {"max_tokens": -1}),
        (COMPLETIONS, prompt | {"model": "another"}),
        (CHAT, chat | {"messages": []}),
        (CHAT, chat | {"response_format": schema}),
    ]
    path, body = rng.choice(bodies)
    return Ask("wrong", path, body, refused=True)
