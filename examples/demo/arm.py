"""Measure one arm in a process of its own: ``python -m examples.demo.arm '{"k": 5, ...}'``.

Progress and the result go to stdout as JSON lines that begin with ``MARK``; whatever vLLM prints is between them.
"""

import gc
import hashlib
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peagle_vllm.acceptance import read_engine

MARK = "@demo "
BATCHES = (1, 8)


@dataclass(frozen=True)
class Arm:
    """What is drafted by what.

    Attributes:
        head: folder of the head, or None for no speculation.
        k: draft tokens a step.
        prompts: how many of the held-out prompts; the first ones are taken.
    """

    name: str
    models: str
    head: str | None = None
    k: int = 0
    parallel: bool = False
    prompts: int = 16
    max_tokens: int = 96
    repeats: int = 3

    def speculative_config(self) -> dict[str, Any] | None:
        if self.head is None:
            return None
        config = {"method": "eagle3", "model": f"{self.models}/{self.head}", "num_speculative_tokens": self.k}
        return config | ({"parallel_drafting": True} if self.parallel else {})


def engine_settings(arm: Arm) -> dict[str, Any]:
    return {
        "model": f"{arm.models}/tiny-llama",
        "speculative_config": arm.speculative_config(),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": max(BATCHES),
        "kv_cache_memory_bytes": 256 << 20,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
    }


def say(**event: Any) -> None:
    print(MARK + json.dumps(event), flush=True)


def drafter_name(worker: Any) -> str:
    """The class that drafts in this worker: V1's proposer or V2's speculator."""
    runner = worker.model_runner
    drafter = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
    return type(drafter).__name__ if drafter is not None else "none"


def measure(arm: Arm) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    gc.freeze()  # vLLM collects garbage seven times a start; its modules' million objects need not be scanned
    llm = LLM(**engine_settings(arm))
    steps = arm.repeats * (arm.prompts + len(BATCHES) - 1)
    say(event="loaded", steps=steps)
    lines = (Path(arm.models) / "prompts/heldout.jsonl").read_text().splitlines()[: arm.prompts]
    assert len(lines) == arm.prompts, f"only {len(lines)} prompts"
    tokenizer = llm.get_tokenizer()
    prompts = []
    for line in lines:
        chat = [{"role": "user", "content": json.loads(line)["prompt"]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        prompts.append({"prompt_token_ids": ids})
    greedy = SamplingParams(temperature=0.0, max_tokens=arm.max_tokens)

    def generate(batch: int) -> tuple[list[list[int]], float]:
        """Output tokens of every prompt, ``batch`` requests in flight, and the seconds it took."""
        start, outputs = time.perf_counter(), []
        groups = [[prompt] for prompt in prompts] if batch == 1 else [prompts]
        for group in groups:
            outputs += llm.generate(group, greedy, use_tqdm=False)
            say(event="step")
        return [list(output.outputs[0].token_ids) for output in outputs], time.perf_counter() - start

    llm.generate(prompts[:4], greedy, use_tqdm=False)  # warm up
    before = read_engine(llm)
    result: dict[str, Any] = {"samples": {}, "tokens_per_second": {}}
    outputs: dict[int, list[list[int]]] = {}
    for batch in BATCHES:
        samples = []
        for repeat in range(arm.repeats):
            outputs[batch], seconds = generate(batch)
            if batch == 1 and repeat == 0:
                seen = read_engine(llm).since(before)
                result |= {"acceptance_length": seen.length, "acceptance": list(seen.shares)}
            samples.append({"tokens": sum(map(len, outputs[batch])), "seconds": seconds})
        rates = sorted(sample["tokens"] / sample["seconds"] for sample in samples)
        result["samples"][batch] = samples
        result["tokens_per_second"][batch] = rates[len(rates) // 2]
    return result | {
        "arm": asdict(arm),
        "drafter": llm.collective_rpc(drafter_name)[0],
        "output_sha256": {b: hashlib.sha256(json.dumps(ids).encode()).hexdigest() for b, ids in outputs.items()},
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    say(event="result", result=measure(Arm(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
