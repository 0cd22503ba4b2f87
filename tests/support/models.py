"""The trained tiny models that ship with the project, for tests that need real acceptance."""

import functools
import json
from pathlib import Path

MODELS = Path(__file__).parents[2] / "models"
TARGET = MODELS / "tiny-llama"
EAGLE3 = MODELS / "tiny-llama-eagle3"
PEAGLE = MODELS / "tiny-llama-peagle"
PEAGLE_REDUCED = MODELS / "tiny-llama-peagle-d2t"
QWEN3 = MODELS / "tiny-qwen3"
QWEN3_PEAGLE = MODELS / "tiny-qwen3-peagle"


def heldout() -> list[str]:
    return [json.loads(line)["prompt"] for line in (MODELS / "prompts" / "heldout.jsonl").read_text().splitlines()]


@functools.cache
def prompt_token_ids() -> list[list[int]]:
    """The held-out prompts through the target's chat template, as token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    chats = [[{"role": "user", "content": prompt}] for prompt in heldout()]
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=True, return_dict=False)
