"""What a request may ask for works while P-EAGLE drafts."""

import json

from openai import OpenAI

from tests.server.asking import MODEL, chat

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["alpha", "beta"]}, "found": {"type": "boolean"}},
    "required": ["name", "found"],
    "additionalProperties": False,
}


def test_json_schema(client: OpenAI, prompts: list[str]) -> None:
    for prompt in prompts[:3]:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=400,
            response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
        )
        found = json.loads(answer.choices[0].message.content)
        assert set(found) == {"name", "found"}
        assert found["name"] in ("alpha", "beta")
        assert isinstance(found["found"], bool)


def test_several_choices(client: OpenAI, prompts: list[str]) -> None:
    request = {"model": MODEL, "prompt": prompts[0], "max_tokens": 32, "n": 3}
    seeded = [client.completions.create(**request, temperature=1.0, seed=5) for _ in range(2)]
    texts = [[choice.text for choice in answer.choices] for answer in seeded]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


def test_stop_string(client: OpenAI, prompts: list[str]) -> None:
    whole = chat(client, prompts[0])
    stop = whole[12:15]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompts[0]}],
        temperature=0,
        max_tokens=48,
        stop=[stop],
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == whole[: whole.index(stop)]


def test_logprobs(client: OpenAI, prompts: list[str]) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompts[0]}],
        temperature=0,
        max_tokens=24,
        logprobs=True,
        top_logprobs=3,
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)  # greedy takes the likeliest
        assert entry.logprob <= 0
