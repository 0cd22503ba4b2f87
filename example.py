"""Offline inference with P-EAGLE on a CPU: SmolLM2-135M-Instruct with its head, or with TARGET=tiny the tiny pair.

From the repository's root: ``make real-target && .venv/bin/python example.py``. On a GPU, the models are
openai/gpt-oss-20b and amazon/GPT-OSS-20B-P-EAGLE, for example, and the last four settings can go. vLLM loads the plugin
by itself.
"""

import os
from pathlib import Path

from vllm import LLM, SamplingParams

from peagle_tools.shared.acceptance import read_engine
from peagle_tools.shared.engines import quick_dtype

REAL = ".cache/real-target", "models/real/peagle", quick_dtype()
TINY = "models/tiny-llama", "models/tiny-llama-peagle", "float32"
PROMPTS = [
    "Write a Python function that reads the lines of a file.",
    "Write a Python class for a stack, with push and pop.",
    "def walk(top):\n",
    "def greet(name):\n    return ",
]


def main() -> None:
    target, head, dtype = TINY if os.environ.get("TARGET") == "tiny" else REAL
    if target == REAL[0] and not Path(target).is_dir():
        raise SystemExit(f"{target} is not there: run `make real-target` first, or TARGET=tiny for the tiny pair")
    llm = LLM(
        model=target,
        speculative_config={
            "method": "eagle3",
            "model": head,
            "num_speculative_tokens": 3,
            "parallel_drafting": True,
        },
        disable_log_stats=False,  # so that vLLM counts what is accepted
        dtype=dtype,
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
