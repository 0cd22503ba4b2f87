"""What one draft step must move and compute: ``python -m benchmarks.roofline [--out FILE]``. No measurement.

For the published P-EAGLE heads (benchmarks/shapes.py), a decode batch of B requests, K drafts each, as V2's graph
computes it; beside it EAGLE-3's K forwards of its one layer, and both trimmed to fewer draft tokens. A bound is the
larger of bytes over bandwidth and operations over the FLOP rate.
``draft_step_roofline`` answers for any head, such as one whose draft vocabulary is still to be chosen.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from benchmarks import arms
from benchmarks.shapes import PUBLISHED, HeadShape

DEPTHS, BATCHES = (3, 5, 7), (1, 64)
TRIMMED, CONTEXT = 32_000, 2048  # draft tokens; tokens of a request
BF16 = 2  # bytes

ASSUMPTIONS = {
    "floor": "the larger of bytes / bandwidth and operations / FLOP rate, both as vendors publish them; launches, "
    "waits and the order of work cost nothing, so a real step takes longer",
    "weights": "read once a forward; norms, biases, embedding rows and activations between layers are left out",
    "rows": "those of V2's graph of a decode batch, whatever was accepted: 2K a request in the layers, K+1 in fc, K in "
    "the lm_head",
    "attention": f"each layer reads the keys and values of every request's context of {CONTEXT:,} tokens, in bfloat16, "
    "once a forward, and each row attends over all of it; writes are left out",
    "logits": "of sampled rows, in the draft vocabulary: written once and read once in bfloat16",
    "EAGLE-3": "K forwards of one layer, each of one row a request, the least (vLLM's first has K+1), with "
    "the width, hidden states and vocabulary of the P-EAGLE head; of the published EAGLE-3 heads many are narrower and "
    "have 32,000 draft tokens, and move less",
}


class Cost(NamedTuple):
    """What one part of a step moves and computes."""

    bytes: float  # to and from the device's memory
    flops: float = 0  # a multiply and an add are two


# Bytes a second of the memory and dense operations a second in bfloat16, as published.
DEVICES = {
    "H200": {"bandwidth": 4.8e12, "flops": 989e12},
    "B200": {"bandwidth": 8e12, "flops": 2250e12},
}


def seconds(parts: dict[str, Cost], device: dict[str, float]) -> tuple[float, float]:
    """Moving and computing, each on its own; the roofline is the larger."""
    moving, computing = (sum(each) for each in zip(*parts.values(), strict=True))
    return moving / device["bandwidth"], computing / device["flops"]


def draft_step_roofline(
    head: HeadShape,
    k: int,
    batch: int,
    *,
    parallel: bool = True,
    draft_vocab: int | None = None,
    context: int = CONTEXT,
) -> dict[str, Cost]:
    """The least that each part of a draft step of a decode batch moves and computes, under ASSUMPTIONS.

    Args:
        k: drafts of each request.
        batch: requests.
        parallel: one forward of the P-EAGLE head; False: K forwards of an EAGLE-3 head of the same width.
        draft_vocab: tokens that the head is trimmed to; None: its own.
        context: tokens that each request attends over.
    """
    head = replace(head, draft_vocab=draft_vocab or head.draft_vocab)
    model, weights, drafts, forwards = head.target, head.weights(parallel), batch * k, 1 if parallel else k
    captured, rows = (batch * (k + 1), 2 * drafts) if parallel else (batch, drafts)
    parts = {"fc": Cost(BF16 * weights["fc"], 2 * captured * weights["fc"])}
    for name, computed in (("layers", rows), ("lm_head", drafts)):
        parts[name] = Cost(BF16 * forwards * weights[name], 2 * computed * weights[name])
    parts["hidden states"] = Cost(BF16 * (head.num_aux * captured + rows) * model.hidden_size)
    attended = head.layers(parallel) * context * model.head_dim  # keys or values of one head, of a request or a row
    read = BF16 * forwards * batch * attended * 2 * model.num_key_value_heads
    parts["attention"] = Cost(read, rows * attended * 4 * model.num_attention_heads)
    parts["logits"] = Cost(2 * BF16 * drafts * head.draft_vocab)
    return parts


def compute() -> Iterator[dict[str, Any]]:
    """Every head, K, B and step; a head whose vocabulary is as small as the trimmed one is not trimmed."""
    for (name, (head, _)), k, batch in product(PUBLISHED.items(), DEPTHS, BATCHES):
        vocabularies = {"": None} | ({f"{TRIMMED:,} tokens": TRIMMED} if head.draft_vocab > TRIMMED else {})
        for (trimmed, size), parallel in product(vocabularies.items(), (True, False)):
            step = ", ".join(filter(None, ("" if parallel else "EAGLE-3", trimmed))) or "as published"
            bound = draft_step_roofline(head, k, batch, parallel=parallel, draft_vocab=size)
            us = {of: [round(1e6 * each, 1) for each in seconds(bound, device)] for of, device in DEVICES.items()}
            bounds = {of: dict(zip(("moving", "computing"), both, strict=True)) for of, both in us.items()}
            where = {"head": name, "k": k, "batch": batch, "step": step}
            yield where | {"bytes": round(sum(part.bytes for part in bound.values())), "us": bounds}


def report() -> dict[str, Any]:
    cells = list(compute())
    sources = {name: source for name, (_, source) in PUBLISHED.items()}
    notes = (f"- {name}: {text}." for name, text in (ASSUMPTIONS | sources).items())
    print(arms.table(cells), *notes, "Computed, not measured", sep="\n")
    return {"assumptions": ASSUMPTIONS, "sizes": sources, "devices": DEVICES, "cells": cells}


if __name__ == "__main__":
    arms.main(__doc__, report)
