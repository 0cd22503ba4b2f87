"""A tiny pair on the held-out prompts of models/: acceptance, speed, output. ``make demo`` and the recipe share it."""

import hashlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.engines import inside, prepare_process, tiny_pair
from peagle_tools.shared.acceptance import read_engine


def read_prompts(llm: Any, file: Path, count: int) -> list[dict[str, Any]]:
    """The first ``count`` prompts of a file, as one user message each."""
    lines = file.read_text().splitlines()[:count]
    chats = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]
    apply = llm.get_tokenizer().apply_chat_template
    return [{"prompt_token_ids": apply(chat, add_generation_prompt=True, return_dict=False)} for chat in chats]


def measure(
    target: str,
    head: str | None,
    k: int,
    models: str,
    batches: list[int],
    prompts: int,
    max_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """Greedy answers to the first prompts, in this process.

    Args:
        batches: how many requests are in flight; all prompts are answered once for each, ``repeats`` times.

    Returns:
        By batch size "samples" (tokens, seconds), the median "tokens_per_second" and "output_sha256"; acceptance of
        the first batch size; the class of the drafter; seconds of the whole.
    """
    prepare_process()
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    sizes = {"max_model_len": 1024, "max_num_seqs": max(batches)}
    llm = LLM(**tiny_pair(target, head, k, models), **sizes, disable_log_stats=False)
    questions = read_prompts(llm, Path(models, "prompts/heldout.jsonl"), prompts)
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)

    def answers(batch: int) -> list[list[int]]:
        outputs = []
        for group in [[question] for question in questions] if batch == 1 else [questions]:
            outputs += llm.generate(group, greedy, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    llm.generate(questions[: min(4, max(batches))], greedy, use_tqdm=False)  # warm up
    before = read_engine(llm)
    result: dict[str, Any] = {"samples": {}, "tokens_per_second": {}, "output_sha256": {}}
    for batch in batches:
        samples = []
        for _ in range(repeats):
            start = time.perf_counter()
            tokens = answers(batch)
            samples.append({"tokens": sum(map(len, tokens)), "seconds": time.perf_counter() - start})
            if "acceptance" not in result:
                counts = read_engine(llm).since(before)
                result |= {"acceptance_length": counts.length, "acceptance": list(counts.shares)}
        result["samples"][batch] = samples
        result["tokens_per_second"][batch] = statistics.median(s["tokens"] / s["seconds"] for s in samples)
        result["output_sha256"][batch] = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
    drafter = inside(llm)[1]
    return result | {"drafter": type(drafter).__name__ if drafter else "none", "seconds": time.perf_counter() - began}
