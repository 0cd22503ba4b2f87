"""Acceptance of answers that a JSON schema constrains, on the real target, with and without the candidate selector.

``make real-target`` first. Each MT-Bench question is answered three times: as it is, with the schema stated in the
prompt, and with that and the schema as vLLM's structured output.
"""

import json
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks import arms
from benchmarks.real import OFF, Engine, RealArm, gain_of, live, read_set, summarize
from peagle_tools.train.config import ends_in_loop

PROMPTS, MAX_TOKENS = 40, 128
TEXT = {"type": "string", "maxLength": 120}
FIELDS = {
    "topic": TEXT,
    "points": {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 4},
    "confidence": {"enum": ["low", "medium", "high"]},
    "answer": TEXT,
}
SCHEMA = {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}
STATED = f"\n\nAnswer as JSON of this schema: {json.dumps(SCHEMA)}"
CASES = {"free": ("", None), "stated": (STATED, None), "structured": (STATED, SCHEMA)}


def answers(engine: Engine, case: str) -> dict[str, Any]:
    """What ``summarize`` takes; ``cut``: the share of draft tokens that vLLM cut because the grammar forbids them."""
    from vllm.sampling_params import StructuredOutputsParams

    stated, schema = CASES[case]
    how = {"structured_outputs": StructuredOutputsParams(json=schema)} if schema else {}
    outputs = engine.answer([[turns[0] + stated] for turns in read_set("mt-bench", PROMPTS)], MAX_TOKENS, **how)
    tokens, counts = [list(output.token_ids) for output in outputs], list(map(engine.counts, outputs))
    proposed = sum(output.spec_decode_metrics.num_draft_tokens for output in outputs)
    found = {"counts": counts, "tokens": list(map(len, tokens)), "loops": list(map(ends_in_loop, tokens))}
    return found | {"cut": round(1 - proposed / (engine.arm.k * int(np.sum(counts))), 4)}


def measure() -> dict[str, Any]:
    cells, rows = {}, []
    for arm in (RealArm(OFF, "peagle", 3), RealArm("P-EAGLE", "peagle", 3, selector=True)):
        with live(arm) as call:
            row: dict[str, Any] = {"arm": asdict(arm)}
            for case in CASES:
                cells[arm.name, case] = cell = call(answers, case)
                row[case] = summarize(cell) | {"cut": cell["cut"]}
                mine, off, free = (
                    np.asarray(cells[of]["counts"]) for of in ((arm.name, case), (OFF, case), (arm.name, "free"))
                )
                row[case] |= gain_of(mine, off) if arm.selector else {}
                row[case] |= {"over_free": gain_of(mine, free)} if case != "free" else {}
                print(arm.label, case, row[case], flush=True)
        rows.append(row)
    return {"schema": SCHEMA, "max_tokens": MAX_TOKENS, "temperature": 0, "arms": rows}


if __name__ == "__main__":
    arms.main(__doc__, measure)
