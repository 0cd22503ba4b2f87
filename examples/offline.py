"""Offline inference: ``python examples/offline.py [PAIR]``, PAIR a file of examples/pairs (default: tiny).

Only the speculative config names P-EAGLE; vLLM loads the plugin by itself.
"""

import os
import sys
from pathlib import Path

import yaml

from peagle_vllm.acceptance import read_engine

EXAMPLES = Path(__file__).resolve().parent
PROMPTS = [
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\n\ndef walk(top):\n",
    "def greet(name):\n    return ",
]


def settings(pair: str) -> dict:
    """The pair's flags as keyword arguments of ``LLM``."""
    flags = yaml.safe_load((EXAMPLES / "pairs" / f"{pair}.yaml").read_text())
    return {name.replace("-", "_"): value for name, value in flags.items()}


def main() -> None:
    pair = sys.argv[1] if len(sys.argv) > 1 else "tiny"
    os.chdir(EXAMPLES.parent)  # the tiny models are named by their place in this repository
    from vllm import LLM, SamplingParams

    llm = LLM(**settings(pair), disable_log_stats=False)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    for prompt, output in zip(PROMPTS, llm.chat(chats, SamplingParams(temperature=0, max_tokens=64)), strict=True):
        print(f"--- {prompt!r}\n{output.outputs[0].text}")

    acceptance = read_engine(llm)
    print(f"--- acceptance length {acceptance.length:.2f} over {acceptance.num_drafts} drafts")


if __name__ == "__main__":
    main()
