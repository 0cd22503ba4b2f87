"""What the soak's clients send: greedy questions whose answers are known, sampled ones, and requests that are wrong."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.support.models import heldout

MODEL, MAX_MODEL_LEN, VOCAB = "tiny-llama", 512, 512
JSON_OBJECT = "JSON object"
KINDS = "completion", "chat", "stop", "long", JSON_OBJECT
WRONG: list[dict[str, Any]] = [  # what no server may answer
    *({"prompt": prompt} for prompt in ([-5], [VOCAB + 5] * 9, [9] * (MAX_MODEL_LEN + 1), "word " * 400_000)),
    {"prompt": "x", "max_tokens": -1},
    {"prompt": "x", "model": "another"},
    {"messages": []},
]


class Ask(NamedTuple):
    kind: str  # for the report
    body: dict[str, Any]  # parameters of the OpenAI client
    known: int | None = None  # number of the greedy question, whose answer is compared
    stream: bool = False  # whether the answer comes in pieces
    leaves: float | None = None  # seconds after which the client goes away


def greedy_questions(count: int) -> list[Ask]:
    """Questions of which each has one right answer."""
    prompts, rng = heldout(), random.Random(0)
    questions = []
    for number in range(count):
        kind, text = rng.choice(KINDS), " ".join(rng.choices(prompts, k=rng.randint(1, 3)))
        body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": rng.choice((4, 16, 48, 96))}
        if kind in ("chat", JSON_OBJECT):
            body["messages"] = [{"role": "user", "content": text[:300]}]
        elif kind == "long":
            tokens = rng.randint(150, MAX_MODEL_LEN - 1)
            body["prompt"] = [rng.randrange(8, VOCAB) for _ in range(tokens)]
            body |= {"max_tokens": min(MAX_MODEL_LEN - tokens, 40), "extra_body": {"ignore_eos": True}}
        else:
            body["prompt"] = text[: rng.choice((3, 400))]
        if kind == JSON_OBJECT:
            body["response_format"] = {"type": "json_object"}
        if kind == "stop":
            body["stop"] = [rng.choice(("e", "self", "\n", " the", "()"))]
        questions.append(Ask(kind, body, number))
    return questions


def traffic(seed: int, known: list[Ask], filtered: bool) -> Iterator[Ask]:
    """An endless mixture for one client, decided by its seed: of 64, 30 ask for JSON objects alone (vLLM 27969).

    Args:
        filtered: some requests ask for top_p or top_k; Triton's interpreter cannot run vLLM's kernel for them.
    """
    rng, prompts = random.Random(seed), heldout()
    objects = [ask for ask in known if ask.kind == JSON_OBJECT]
    # No seeds: on V1 without a GPU a seeded prompt in chunks ends the engine, "CPU Generator does not use offset".
    more: list[dict[str, Any]] = [{}, {"n": 3}, {"logprobs": 2}, {"presence_penalty": 1.0}]
    more += [{"top_p": 0.8}, {"extra_body": {"top_k": 5}}] if filtered else []
    while True:
        share = rng.random()
        if seed * 30 % 64 < 30:
            yield rng.choice(objects)
        elif share < 0.12:
            yield Ask("wrong", {"model": MODEL, "max_tokens": 8} | rng.choice(WRONG))
        else:
            heat = {"temperature": rng.choice((0.2, 0.7, 1.0, 1.5)), "max_tokens": rng.randint(1, 64)}
            body = {"model": MODEL, "prompt": rng.choice(prompts), **heat, **rng.choice(more)}
            ask = rng.choice(known) if share < 0.75 else Ask("sampled", body)
            leaves = rng.uniform(0, 2) if rng.random() < 0.15 else None
            yield ask._replace(stream=rng.random() < 0.5, leaves=leaves)
