"""A target's own greedy answers to training prompts: the text its heads learn from.

Heads trained on the source text itself are far worse: they must predict the target's answers, not the file.
"""

import random
from pathlib import Path

import torch
from corpus import pieces
from tokens import chat_prompt_ids, load_tokenizer

ANSWER_TOKENS = (64, 160)  # fewest, most tokens of an answer


def generate(target: Path, file: Path, prompts: int, seed: int) -> dict:
    """Write ``prompts`` exchanges to ``file`` as a list of (prompt length, [tokens] int16); returns their figures."""
    from vllm import LLM, SamplingParams

    rng = random.Random(seed)
    tokenizer = load_tokenizer(target)
    questions = [chat_prompt_ids(tokenizer, piece.prompt) for piece in pieces(held_out=False, seed=seed)[:prompts]]
    engine = LLM(
        model=str(target),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=128,
        kv_cache_memory_bytes=512 << 20,
        seed=seed,
    )
    limits = [SamplingParams(temperature=0.0, max_tokens=rng.randint(*ANSWER_TOKENS)) for _ in questions]
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in questions], limits)
    exchanges = [
        (len(out.prompt_token_ids), torch.tensor([*out.prompt_token_ids, *out.outputs[0].token_ids], dtype=torch.int16))
        for out in outputs
    ]
    torch.save(exchanges, file)
    answered = sum(len(ids) - start for start, ids in exchanges)
    return {"prompts": len(exchanges), "answer_tokens": answered, "seed": seed}
