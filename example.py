"""Offline inference with P-EAGLE, on the tiny pair of this repository and a CPU.

From the repository's root: ``make env && .venv/bin/python example.py``. On a GPU, the models are openai/gpt-oss-20b and
amazon/gpt-oss-20b-p-eagle, for example, and the last four settings can go. vLLM loads the plugin by itself.
"""

from vllm import LLM, SamplingParams

from peagle_tools.shared.acceptance import read_engine

PROMPTS = [
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\n\ndef walk(top):\n",
    "def greet(name):\n    return ",
]


def main() -> None:
    llm = LLM(
        model="models/tiny-llama",
        speculative_config={
            "method": "eagle3",
            "model": "models/tiny-llama-peagle",
            "num_speculative_tokens": 5,
            "parallel_drafting": True,
        },
        disable_log_stats=False,  # so that vLLM counts what is accepted
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        kv_cache_memory_bytes=256 << 20,
    )
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    for prompt, output in zip(PROMPTS, llm.chat(chats, SamplingParams(temperature=0, max_tokens=64)), strict=True):
        print(f"--- {prompt!r}\n{output.outputs[0].text}")

    acceptance = read_engine(llm)
    print(f"--- acceptance length {acceptance.length:.2f} over {acceptance.num_drafts} drafts")


if __name__ == "__main__":  # vLLM starts processes, and they import this file
    main()
