"""Acceptance of probabilistic drafts with and without the request's top-k and top-p, on the real target.

``make real-target`` first. The engine is V1.
"""

from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks import arms
from benchmarks.real import PLAIN, SETS, Engine, RealArm, al_of, gain_of, live, read_set
from peagle_tools.shared.provenance import provenance

CASES = [{"temperature": heat, **limit} for heat in (0.7, 1.0) for limit in ({}, {"top_p": 0.9}, {"top_k": 20})]
PROMPTS, MAX_TOKENS, K = 80, 128, 3
ARMS = {
    "peagle": RealArm("P-EAGLE", "peagle", K, selector=True, probabilistic=True),
    "peagle-plain": RealArm(PLAIN, "peagle-plain", K, probabilistic=True),
}


def sampled(engine: Engine, name: str, prompts: int, sampling: dict[str, float], within: bool) -> list[list[int]]:
    """The accepted counts of an answer to each first turn."""
    from peagle_vllm.v1 import proposer

    chats = [turns[:1] for turns in read_set(name, prompts)]
    kept = proposer.within_limits if within else lambda logits, _: logits
    with patch.object(proposer, "within_limits", kept):
        return [engine.counts(output) for output in engine.answer(chats, MAX_TOKENS, **sampling)]


def main() -> None:
    parser = arms.parser(__doc__)
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of each set, spread over it")
    parser.add_argument("--head", choices=ARMS, default="peagle")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with live(ARMS[args.head]) as call:
        for sampling in CASES:
            for name in SETS:
                within = np.asarray(call(sampled, name, args.prompts, sampling, True))
                found = {"within_limits": al_of(within)}
                if len(sampling) > 1:
                    without = np.asarray(call(sampled, name, args.prompts, sampling, False))
                    found = {"temperature_only": al_of(without)} | found | gain_of(within, without)
                rows.append({"sampling": sampling, "set": name, **found})
                print(rows[-1], flush=True)
    how = {"head": args.head, "k": K, "prompts": args.prompts, "max_tokens": MAX_TOKENS}
    arms.write_result(args.out, __doc__, {**how, "cells": rows, **provenance()})


if __name__ == "__main__":
    main()
