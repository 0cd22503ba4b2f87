"""A client of examples/serve.sh: ``python examples/client.py [URL]`` streams a chat answer and a completion."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

from openai import OpenAI


def show(stream: Iterable[Any], text: Callable[[Any], str | None]) -> None:
    """Print the pieces of an answer as they arrive."""
    for chunk in stream:
        print(text(chunk.choices[0]) or "", end="", flush=True)
    print()


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    options = {"model": client.models.list().data[0].id, "temperature": 0, "max_tokens": 64, "stream": True}
    print("--- chat")
    chat = [{"role": "user", "content": "def read_lines(path):\n"}]
    show(client.chat.completions.create(messages=chat, **options), lambda choice: choice.delta.content)
    print("--- completion")
    show(client.completions.create(prompt="import os\n\ndef walk(top):\n", **options), lambda choice: choice.text)


if __name__ == "__main__":
    main()
