"""A client of examples/serve.sh: ``.venv/bin/python examples/client.py [URL]`` streams the answer to a chat."""

import sys

from openai import OpenAI


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    chat = [{"role": "user", "content": "def read_lines(path):\n"}]
    for chunk in client.chat.completions.create(model=model, messages=chat, temperature=0, max_tokens=64, stream=True):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
