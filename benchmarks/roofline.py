"""What one draft step must move and compute: ``python -m benchmarks.roofline [--out FILE]``. No measurement.

For the published P-EAGLE heads (benchmarks/shapes.py), a decode batch of B requests, K drafts each, as V2's graph
computes it: the head as it is, trimmed to fewer draft tokens, quantised, and sharpened; beside it EAGLE-3's K
forwards of its one layer. A bound is the larger of bytes over bandwidth and operations over the FLOP rate.
``draft_step_roofline`` answers for any head, such as one whose draft vocabulary is still to be chosen.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from benchmarks import arms
from benchmarks.shapes import PUBLISHED, HeadShape
from peagle_tools.shared.provenance import provenance

DEPTHS, BATCHES, RANKS = (3, 5, 7), (1, 64), (64, 256)
DRAFT_VOCABS, CONTEXT = (32_000, 64_000), 2048
BF16 = 2  # bytes
CANDIDATES = 16  # of each draft of a sharpened head (M)
CANDIDATE = 28  # bytes: int64 id and float32 logit, written and read once, and a float32 score, written

ASSUMPTIONS = {
    "floor": "the larger of bytes / bandwidth and operations / FLOP rate, both as vendors publish them; launches, "
    "waits and the order of work cost nothing, so a real step takes longer",
    "weights": "read once a forward; norms, biases, embedding rows and activations between layers are left out",
    "rows": "those of V2's graph of a decode batch, whatever was accepted: 2K a request in the layers, K+1 in fc, K in "
    "the lm_head",
    "attention": f"each layer reads the keys and values of every request's context of {CONTEXT:,} tokens, in bfloat16, "
    "once a forward, and each row attends over all of it; writes are left out",
    "logits": "of sampled rows, in the draft vocabulary: written once and read once in bfloat16, by argmax or by top-M",
    "fp8": "one byte a weight in layers and lm_head, scales left out (0.2% at most); fc and the rest in bfloat16. "
    "Weights of 8 bits or fewer are multiplied at twice the 16-bit FLOP rate",
    "selector": "M = 16, tables and projection in bfloat16: the projection once, one predecessor row and M successor "
    "rows for each draft, gates and candidates written and read once; no table row serves two drafts",
    "EAGLE-3": "K forwards of one layer, each of one row a request, the least (vLLM's first has K+1), with "
    "the width, hidden states and vocabulary of the P-EAGLE head; of the published EAGLE-3 heads many are narrower and "
    "have 32,000 draft tokens, and move less",
}


class Cost(NamedTuple):
    """What one part of a step moves and computes."""

    bytes: float  # to and from the device's memory
    flops: float = 0  # a multiply and an add are two
    speed: int = 1  # of its operations, in multiples of the 16-bit FLOP rate


class Device(NamedTuple):
    """Bytes a second of its memory, and dense 16-bit operations a second."""

    bandwidth: float
    flops: float


# As published; operations dense in bfloat16.
DEVICES = {"H200": Device(4.8e12, 989e12), "B200": Device(8e12, 2250e12)}


@dataclass(frozen=True)
class Roofline:
    """The least that a step moves and computes, by part."""

    parts: dict[str, Cost]

    @property
    def bytes(self) -> float:
        return sum(part.bytes for part in self.parts.values())

    def seconds(self, device: Device) -> tuple[float, float]:
        """Moving and computing, each on its own; the roofline is the larger."""
        computing = sum(part.flops / part.speed for part in self.parts.values()) / device.flops
        return self.bytes / device.bandwidth, computing


def draft_step_roofline(
    head: HeadShape,
    k: int,
    batch: int,
    *,
    parallel: bool = True,
    draft_vocab: int | None = None,
    weight_bytes: int = BF16,
    rank: int = 0,
    context: int = CONTEXT,
) -> Roofline:
    """One draft step of a decode batch, under ASSUMPTIONS.

    Args:
        k: drafts of each request.
        batch: requests.
        parallel: one forward of the P-EAGLE head; False: K forwards of an EAGLE-3 head of the same width.
        draft_vocab: tokens that the head is trimmed to; None: its own.
        weight_bytes: of a weight in the layers and the lm_head.
        rank: width of a sharpened head's two tables; 0: a head as it was trained.
        context: tokens that each request attends over.
    """
    model, weights = head.target, replace(head, draft_vocab=draft_vocab or head.draft_vocab).weights(parallel)
    drafts, forwards, speed = batch * k, 1 if parallel else k, 1 if weight_bytes >= BF16 else 2
    captured, rows = (batch * (k + 1), 2 * drafts) if parallel else (batch, drafts)
    parts = {"fc": Cost(BF16 * weights["fc"], 2 * captured * weights["fc"])}
    for name, computed in (("layers", rows), ("lm_head", drafts)):
        parts[name] = Cost(weight_bytes * forwards * weights[name], 2 * computed * weights[name], speed)
    parts["hidden states"] = Cost(BF16 * (head.num_aux * captured + rows) * model.hidden)
    attended = head.layers(parallel) * context * model.head_dim  # keys or values of one head, of a request or a row
    read = BF16 * forwards * batch * attended * 2 * model.kv_heads
    parts["attention"] = Cost(read, rows * attended * 4 * model.heads)
    parts["logits"] = Cost(2 * BF16 * drafts * (draft_vocab or head.draft_vocab))
    if rank:
        projection = rank * model.hidden
        moved = BF16 * (projection + drafts * rank * (1 + CANDIDATES)) + drafts * 2 * BF16 * rank
        moved += drafts * CANDIDATE * CANDIDATES
        parts["selector"] = Cost(moved, drafts * (2 * projection + rank * (1 + 2 * CANDIDATES)))
    return Roofline(parts)


def variants(head: HeadShape) -> dict[str, dict[str, Any]]:
    """Name of a step -> what ``draft_step_roofline`` takes for it, without vocabularies not below the head's own."""
    trimmed = {f"{size:,} tokens": {"draft_vocab": size} for size in DRAFT_VOCABS if size < head.draft_vocab}
    fp8, selectors = {"weight_bytes": 1}, {f"selector of rank {rank}": {"rank": rank} for rank in RANKS}
    steps = {"as published": {}, **trimmed, "fp8": fp8, **selectors, "EAGLE-3": {"parallel": False}}
    for fewest, size in list(trimmed.items())[:1]:
        selector, of_rank = next(iter(selectors.items()))
        steps |= {f"{fewest}, fp8, {selector}": size | fp8 | of_rank, f"EAGLE-3, {fewest}": size | {"parallel": False}}
    return steps


def compute() -> Iterator[dict[str, Any]]:
    """Every head, K, B and step."""
    for (name, (head, _)), k, batch in product(PUBLISHED.items(), DEPTHS, BATCHES):
        for step, more in variants(head).items():
            bound = draft_step_roofline(head, k, batch, **more)
            us = {of: [round(1e6 * seconds, 1) for seconds in bound.seconds(device)] for of, device in DEVICES.items()}
            yield {
                "head": name,
                "k": k,
                "batch": batch,
                "step": step,
                "bytes": round(bound.bytes),
                "us": {of: {"moving": moving, "computing": computing} for of, (moving, computing) in us.items()},
            }


def rows(cells: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    """Each cell: gigabytes, and for each device the bound in microseconds; a star: by arithmetic, else by bytes."""
    for cell in cells:
        bounds = cell["us"].values()
        us = (f"{max(bound.values()):,.0f}{'*' * (bound['computing'] > bound['moving'])}" for bound in bounds)
        yield cell["head"], cell["step"], cell["k"], cell["batch"], f"{cell['bytes'] / 1e9:.2f}", *us


def main() -> None:
    out = arms.parser(__doc__).parse_args().out
    cells = list(compute())
    sources = {name: source for name, (_, source) in PUBLISHED.items()}
    devices = {name: device._asdict() for name, device in DEVICES.items()}
    report = {"assumptions": ASSUMPTIONS, "sizes": sources, "devices": devices, **provenance(), "cells": cells}
    columns = ("head", "step", "K", "B", "GB", *(f"{name}, us" for name in DEVICES))
    print(arms.table(columns, rows(cells), "*: by arithmetic"))
    print(*(f"- {name}: {text}." for name, text in (ASSUMPTIONS | sources).items()), sep="\n")
    print("Computed, not measured")
    arms.write_result(out, __doc__, report)


if __name__ == "__main__":
    main()
