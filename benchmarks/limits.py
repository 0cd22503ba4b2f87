"""Acceptance of probabilistic drafts with and without the request's top-k and top-p, on the real target.

``make real-target`` first. The engine is V1. EAGLE-3, stock vLLM's, drafts by the temperature alone. What was measured
of a drafter is kept in .cache/real-bench; remove it after a change.
"""

from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks import arms
from benchmarks.real import PLAIN, SETS, WORK, Engine, RealArm, al_of, answered, gain_of, read_set
from peagle_tools.shared.provenance import provenance

TEMPERATURES, LIMITS = (0.7, 1.0), ({}, {"top_p": 0.9}, {"top_k": 20})
PROMPTS, MAX_TOKENS, K = 80, 128, 3
ARMS = (
    RealArm("P-EAGLE", "peagle", K, selector=True, probabilistic=True),
    RealArm(PLAIN, "peagle-plain", K, probabilistic=True),
    RealArm("EAGLE-3", "eagle3", K, probabilistic=True),
)


def sampled(engine: Engine, name: str, prompts: int, sampling: dict[str, float], within: bool) -> list[list[int]]:
    """The accepted counts of an answer to each first turn."""
    from peagle_vllm import patches
    from peagle_vllm.v1 import proposer

    chats = [turns[:1] for turns in read_set(name, prompts)]
    kept = proposer.within_limits if within else lambda logits, _: logits
    # Without cpu-sampling no draft of stock vLLM is verified by its request's temperature on a CPU.
    with patch.object(proposer, "within_limits", kept), patch.object(patches, "serving_peagle", True):
        return [engine.counts(output) for output in engine.answer(chats, MAX_TOKENS, **sampling)]


def measure(engine: Engine) -> dict[str, Any]:
    """``cells``: by request and set the ``sampled`` counts within its limits, and where it has some beside them."""
    arm, cells = engine.arm, []
    for heat, limit, name in product(TEMPERATURES, ({},) if arm.head == "eagle3" else LIMITS, SETS):
        sampling = {"temperature": heat, **limit}
        counts = [sampled(engine, name, PROMPTS, sampling, within) for within in (True, False)[: 1 + len(limit)]]
        cells.append({"sampling": sampling, "set": name, "counts": counts})
        print(arm.name, sampling, name, *(al_of(np.asarray(one)) for one in counts), flush=True)
    return {"name": arm.name, "cells": cells, "commit": provenance()["commit"]}


def compared(drafters: list[dict[str, Any]]) -> None:
    """Put figures in place of the counts of ``cells``; the last drafter is EAGLE-3."""
    eagle3 = {(cell["sampling"]["temperature"], cell["set"]): cell["counts"][0] for cell in drafters[-1]["cells"]}
    for drafter in drafters:
        for cell in drafter["cells"]:
            within, *alone = map(np.asarray, cell.pop("counts"))
            cell["within_limits"] = al_of(within)
            if alone:
                cell |= {"temperature_only": al_of(*alone)} | gain_of(within, *alone)
            elif drafter is not drafters[-1]:
                other = np.asarray(eagle3[cell["sampling"]["temperature"], cell["set"]])
                cell["over_eagle3"] = gain_of(within, other)


def report() -> dict[str, Any]:
    files = {arm: WORK / f"limits {arm.label} {arm.digest()} counts.json" for arm in ARMS}
    drafters = [answered(file, arm, measure) for arm, file in files.items()]
    compared(drafters)
    return {"k": K, "prompts": PROMPTS, "max_tokens": MAX_TOKENS, "drafters": drafters}


if __name__ == "__main__":
    arms.main(__doc__, report)
