"""Acceptance and output of a pair on a few prompts, in float32: what the recipes of models/ record."""

import hashlib
import json
from typing import Any

from benchmarks.engines import prepare_process, tiny_pair
from peagle_tools.shared.acceptance import read_engine


def measure(
    target: str, head: str | None, k: int, models: str, batch: int, prompts: list[str], max_tokens: int
) -> dict[str, Any]:
    """Greedy answers to ``prompts``, ``batch`` in flight, in this process; target and head are below ``models``.

    Returns:
        Acceptance, and number and hash of the tokens.
    """
    prepare_process()
    from vllm import LLM, SamplingParams

    llm = LLM(**tiny_pair(target, head, k, models), max_model_len=1024, max_num_seqs=batch, disable_log_stats=False)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=max_tokens), use_tqdm=False)
    tokens, counts = [list(output.outputs[0].token_ids) for output in outputs], read_engine(llm)
    return {
        "output_tokens": sum(map(len, tokens)),
        "output_sha256": hashlib.sha256(json.dumps(tokens).encode()).hexdigest(),
        "acceptance_length": counts.length,
        "acceptance": list(counts.shares),
    }
