"""Greedy questions to the server, streamed and not."""

from openai import OpenAI

MODEL = "tiny-llama"


def chat(client: OpenAI, prompt: str, *, max_tokens: int = 48) -> str:
    """The whole answer in one piece."""
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=max_tokens
    )
    return answer.choices[0].message.content or ""


def streamed_chat(client: OpenAI, prompt: str, *, max_tokens: int = 48) -> list[str]:
    """The pieces of the answer, as they arrived."""
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=max_tokens,
        stream=True,
    )
    return [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
