"""What `vllm bench serve` would write, made from a known cost model. Standard library only: stand-ins start fast."""

from typing import Any

ACCEPTANCE = {"EAGLE-3": 0.62, "P-EAGLE": 0.75}
OUTPUT_TOKENS, PROMPTS = 64, 12


def raw(kind: str, k: int, concurrency: int, *, noise: float = 1.0, prompts: int = PROMPTS) -> dict[str, Any]:
    """What the client writes; ``noise`` multiplies the time that everything takes.

    A target step costs 4 ms and 0.2 ms a request; a round that speculates 2 ms more, 1 ms a draft forward, 0.05 ms a
    drafted token.
    """
    forwards = k if kind == "EAGLE-3" else 1
    round_ms = 4 + 0.2 * concurrency + (2 + forwards + 0.05 * k * concurrency if k else 0)
    drafts = 1000
    accepted = [round(drafts * ACCEPTANCE[kind] ** (i + 1)) for i in range(k)] if k else []
    tpot = round_ms * noise / (1 + sum(accepted) / drafts) / 1000  # seconds a token of a request
    times = {"ttft": 0.02 * noise, "tpot": tpot}
    counts = {
        "spec_decode_acceptance_length": 1 + sum(accepted) / drafts,
        "spec_decode_num_drafts": drafts,
        "spec_decode_accepted_tokens": sum(accepted),
        "spec_decode_per_position_acceptance_rates": [count / drafts for count in accepted],
    }
    return {
        "completed": prompts,
        "failed": 0,
        "output_throughput": concurrency / tpot,
        "output_lens": [OUTPUT_TOKENS] * prompts,
        **{f"p{p}_{name}_ms": 1000 * seconds for name, seconds in times.items() for p in (50, 99)},
        "errors": [""] * prompts,
        "generated_texts": [f"answer {i}" for i in range(prompts)],
        **(counts if k else {}),
    }
