"""A client of examples/serve.sh: ``python examples/client.py [URL]`` streams a chat answer and a completion."""

import sys

from openai import OpenAI


def chat(client: OpenAI, model: str, text: str) -> str:
    """Print the answer as it arrives; returns it whole."""
    messages = [{"role": "user", "content": text}]
    stream = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=64, stream=True)
    answer = ""
    for chunk in stream:
        piece = chunk.choices[0].delta.content or ""
        print(piece, end="", flush=True)
        answer += piece
    print()
    return answer


def complete(client: OpenAI, model: str, text: str) -> str:
    """Print the text as it goes on; returns what was added."""
    stream = client.completions.create(model=model, prompt=text, temperature=0, max_tokens=64, stream=True)
    added = ""
    for chunk in stream:
        print(chunk.choices[0].text, end="", flush=True)
        added += chunk.choices[0].text
    print()
    return added


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    print("--- chat")
    chat(client, model, "def read_lines(path):\n")
    print("--- completion")
    complete(client, model, "import os\n\ndef walk(top):\n")


if __name__ == "__main__":
    main()
