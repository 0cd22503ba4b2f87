"""What one draft step must move and compute: ``python -m benchmarks.roofline [--out FILE]``. No measurement.

For the published P-EAGLE heads (benchmarks/shapes.py), a decode batch of B requests, K drafts each, as V2's graph
computes it: the head as it is, trimmed to fewer draft tokens, quantised, and sharpened; beside it EAGLE-3's K
forwards of its one layer, and the target's own step that verifies the drafts. A bound is the larger of bytes over
bandwidth and operations over the FLOP rate. ``draft_step_roofline`` answers for any head, such as one whose draft
vocabulary is still to be chosen.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from benchmarks import arms
from benchmarks.arms import Published
from benchmarks.shapes import PUBLISHED, Head, Model, Target
from peagle_tools.shared.provenance import provenance

DEPTHS, BATCHES, RANKS = (3, 5, 7), (1, 64), (64, 256)
DRAFT_VOCABS, CONTEXT = (32_000, 64_000), 2048
BF16 = 2  # bytes
CANDIDATE = 28  # bytes: int64 id and float32 logit, written and read once, and a float32 score, written

ASSUMPTIONS = {
    "floor": "the larger of bytes / bandwidth and operations / FLOP rate, both as vendors publish them; launches, "
    "waits and the order of work cost nothing, so a real step takes longer",
    "weights": "read once a forward; norms, biases, embedding rows and activations between layers are left out",
    "rows": "those of V2's graph of a decode batch, whatever was accepted: 2K a request in the layers, K+1 in fc, K in "
    "the lm_head",
    "attention": "each layer reads the keys and values of every request's context once a forward, and each row attends "
    "over all of it; writes are left out",
    "logits": "of sampled rows, in the draft vocabulary: written once and read once in bfloat16, by argmax or by top-M",
    "fp8": "one byte a weight in layers and lm_head, scales left out (0.2% at most); fc and the rest in bfloat16. "
    "Weights of 8 bits or fewer are multiplied at twice the 16-bit FLOP rate",
    "selector": "M = 16, tables and projection in bfloat16: the projection once, one predecessor row and M successor "
    "rows for each draft, gates and candidates written and read once; no table row serves two drafts",
    "EAGLE-3": "K forwards of one layer, each of one row a request, the least (vLLM's first has K+1), with "
    "the width, hidden states and vocabulary of the P-EAGLE head; of the published EAGLE-3 heads many are narrower and "
    "have 32,000 draft tokens, and move less",
    "target": "K+1 rows a request, logits of all; lm_head and router in bfloat16. Tokens choose experts independently "
    "and evenly: T of them read experts x (1 - (1 - active / experts)^T) in a layer, text whose tokens agree fewer",
}


class Part(NamedTuple):
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

    parts: dict[str, Part]

    @property
    def bytes(self) -> float:
        return sum(part.bytes for part in self.parts.values())

    @property
    def flops(self) -> float:
        return sum(part.flops for part in self.parts.values())

    def seconds(self, device: Device) -> tuple[float, float]:
        """Moving and computing, each on its own; the roofline is the larger."""
        computing = sum(part.flops / part.speed for part in self.parts.values()) / device.flops
        return self.bytes / device.bandwidth, computing


class Selector(NamedTuple):
    """A selector head: the width of its two tables, and the candidates of each position (M)."""

    rank: int
    candidates: int = 16


def draft_step_roofline(
    head: Head,
    k: int,
    batch: int,
    *,
    parallel: bool = True,
    draft_vocab: int | None = None,
    weight_bytes: int = BF16,
    selector: Selector | None = None,
    context: int = CONTEXT,
    kv_bytes: int = BF16,
) -> Roofline:
    """One draft step of a decode batch, under ASSUMPTIONS.

    Args:
        k: drafts of each request.
        batch: requests.
        parallel: one forward of the P-EAGLE head; False: K forwards of an EAGLE-3 head of the same width.
        draft_vocab: tokens that the head is trimmed to; None: its own.
        weight_bytes: of a weight in the layers and the lm_head.
        selector: what a sharpened head has beside; None: a head as it was trained.
        context: tokens that each request attends over.
        kv_bytes: of a number in the KV cache.

    Raises:
        ValueError: more draft tokens than the target has, or none.
    """
    head = head if draft_vocab is None else replace(head, draft_vocab=draft_vocab)
    if not 0 < head.draft_vocab <= head.target.vocab:
        raise ValueError(f"draft vocabulary of {head.draft_vocab}: must be 1 to {head.target.vocab}, the target's own")
    model, weights, drafts, forwards = head.target, head.weights(parallel), batch * k, 1 if parallel else k
    captured, rows = (batch * (k + 1), 2 * drafts) if parallel else (batch, drafts)
    parts = {"fc": Part(BF16 * weights["fc"], 2 * captured * weights["fc"])}
    for name, computed in (("layers", rows), ("lm_head", drafts)):
        parts[name] = _matrix(forwards * weights[name], weight_bytes, computed * weights[name])
    parts["hidden states"] = Part(BF16 * (head.num_aux * captured + rows) * model.hidden)
    caches = forwards * head.layers(parallel) * batch
    parts["attention"] = _attention(model, caches, rows // (forwards * batch), context, kv_bytes)
    parts["logits"] = Part(2 * BF16 * drafts * head.draft_vocab)
    if selector:
        projection, rank, m = selector.rank * model.hidden, selector.rank, selector.candidates
        moved = BF16 * (projection + drafts * rank * (1 + m)) + drafts * (2 * BF16 * rank + CANDIDATE * m)
        parts["selector"] = Part(moved, drafts * (2 * projection + rank * (1 + 2 * m)))
    return Roofline(parts)


def target_step_roofline(
    target: Target, k: int, batch: int, *, context: int = CONTEXT, kv_bytes: int = BF16
) -> Roofline:
    """The target's step that verifies K drafts of each request, under ASSUMPTIONS.

    Arguments as ``draft_step_roofline``.
    """
    model, tokens = target.model, batch * (k + 1)
    attention = model.layers * model.hidden * model.head_dim * 2 * (model.heads + model.kv_heads)
    expert = model.layers * 3 * model.hidden * model.intermediate
    touched = target.experts * (1 - (1 - target.active / target.experts) ** tokens)
    router = model.layers * model.hidden * target.experts if target.experts > 1 else 0
    lm_head = model.vocab * model.hidden
    parts = {
        "attention matrices": _matrix(attention, target.attention_bytes, tokens * attention),
        "experts": _matrix(touched * expert, target.mlp_bytes, tokens * target.active * expert),
        "router": _matrix(router, BF16, tokens * router),
        "lm_head": _matrix(lm_head, BF16, tokens * lm_head),
        "logits": Part(2 * BF16 * tokens * model.vocab),
    }
    windowed, window = model.layers // 2 if target.window else 0, min(context, target.window or context)
    parts["attention"] = _attention(model, (model.layers - windowed) * batch, k + 1, context, kv_bytes)
    parts["windowed attention"] = _attention(model, windowed * batch, k + 1, window, kv_bytes)
    return Roofline({name: part for name, part in parts.items() if part.bytes})


def _matrix(weights: float, weight_bytes: float, products: float) -> Part:
    """Weights read, and a multiply and an add for each product of a weight with a row."""
    return Part(weight_bytes * weights, 2 * products, 1 if weight_bytes >= BF16 else 2)


def _attention(model: Model, caches: int, rows: int, context: int, kv_bytes: int) -> Part:
    """``caches``: layers x requests x forwards, in each of which ``rows`` rows attend over ``context`` tokens."""
    moved = caches * context * 2 * model.kv_heads * model.head_dim * kv_bytes
    return Part(moved, caches * rows * context * 4 * model.heads * model.head_dim)


def variants(head: Head, draft_vocabs: list[int]) -> dict[str, dict[str, Any]]:
    """Name of a step -> what ``draft_step_roofline`` takes for it, without vocabularies not below the head's own."""
    trimmed = {f"{size:,} tokens": {"draft_vocab": size} for size in sorted(draft_vocabs) if size < head.draft_vocab}
    fp8, selectors = {"weight_bytes": 1}, {f"edge of rank {rank}": {"selector": Selector(rank)} for rank in RANKS}
    steps = {"as published": {}, **trimmed, "fp8": fp8, **selectors, "EAGLE-3": {"parallel": False}}
    for fewest, size in list(trimmed.items())[:1]:
        selector, of_rank = next(iter(selectors.items()))
        steps |= {f"{fewest}, fp8, {selector}": size | fp8 | of_rank, f"EAGLE-3, {fewest}": size | {"parallel": False}}
    return steps


def compute(draft_vocabs: list[int], devices: dict[str, Device], **setting: int) -> Iterator[dict[str, Any]]:
    """Every head, K, B and step; ``setting``: ``context`` and ``kv_bytes``."""
    for (name, (head, target, _)), k, batch in product(PUBLISHED.items(), DEPTHS, BATCHES):
        steps = variants(head, draft_vocabs)
        bounds = {step: draft_step_roofline(head, k, batch, **more, **setting) for step, more in steps.items()}
        bounds["the target's step"] = target_step_roofline(target, k, batch, **setting)
        for step, bound in bounds.items():
            us = {of: [round(1e6 * seconds, 1) for seconds in bound.seconds(device)] for of, device in devices.items()}
            yield {
                "head": name,
                "k": k,
                "batch": batch,
                "step": step,
                "bytes": {part: round(made.bytes) for part, made in bound.parts.items()},
                "flops": round(bound.flops),
                "us": {of: {"moving": moving, "computing": computing} for of, (moving, computing) in us.items()},
            }


def roofline_us(us: dict[str, float]) -> str:
    """The larger of moving and computing, with a star where that is computing."""
    return f"{max(us.values()):,.0f}{'*' if us['computing'] > us['moving'] else ''}"


def eagle3_lower(cells: list[dict[str, Any]], device: str) -> str:
    """Where an EAGLE-3 head's bound is below the P-EAGLE head's, whose vocabulary may be larger."""
    of = {(c["head"], c["batch"], c["k"], c["step"]): max(c["us"][device].values()) for c in cells}
    found: dict[str, dict[str, list[str]]] = {}
    for (name, batch, k, step), us in of.items():
        mine = ("as published", *((step.removeprefix("EAGLE-3, "),) if ", " in step else ()))
        for other in mine if step.startswith("EAGLE-3") else ():
            if us < of[name, batch, k, other]:
                places = found.setdefault(f"{step} against {other}", {})
                places.setdefault(f"{name}, B = {batch}", []).append(str(k))
    texts = {
        pair: "; ".join(f"{place}, K = {' / '.join(ks)}" for place, ks in of.items()) for pair, of in found.items()
    }
    return "; ".join(f"{pair} ({text})" for pair, text in texts.items()) or "nowhere"


def published(result: dict[str, Any], device: str = "H200") -> Published:
    """What a step takes of one device, the K side by side."""
    depths = sorted({cell["k"] for cell in result["cells"]})
    cells = {(c["head"], c["step"], c["batch"], c["k"]): c for c in result["cells"]}
    batches, rows = sorted({cell["batch"] for cell in result["cells"]}), []
    for head, step in dict.fromkeys(key[:2] for key in cells):
        texts: list[str] = []
        for batch in batches:
            of_k = [cells[head, step, batch, k] for k in depths]
            moved, us = (
                sum(of_k[-1]["bytes"].values()) / 1e9,
                " / ".join(roofline_us(cell["us"][device]) for cell in of_k),
            )
            texts += [f"{moved:.2f}", us]
        rows.append((head, step, *texts))
    kinds = (f"GB at K = {depths[-1]}", f"us at K = {' / '.join(map(str, depths))}")
    columns = ["head", "step", *(f"B = {batch}: {kind}" for batch in batches for kind in kinds)]
    rates, first = result["devices"][device], rows[0][0]
    selectors = [
        f"{cell['bytes']['selector'] / 1e6:.2f} MB for rank {step.split()[-1]} at B = {batch}"
        for (head, step, batch, k), cell in cells.items()
        if (head, k) == (first, depths[-1]) and step.startswith("selector")
    ]
    notes = (
        f"{device}: {rates['bandwidth'] / 1e12:g} TB/s and {rates['flops'] / 1e12:g} TFLOP/s; a star: bound by "
        f"arithmetic, else by bytes. {result['context']:,} tokens of context, {result['kv_bytes']} bytes a number of "
        f"the KV cache. The selector itself moves, for {first} at K = {depths[-1]}: {', '.join(selectors)}. "
        f"Where EAGLE-3's bound is the lower one: {eagle3_lower(result['cells'], device)}."
    )
    assumed = "\n".join(f"- {name}: {text}." for name, text in (result["assumptions"] | result["sizes"]).items())
    return columns, rows, f"{notes}\n\nAssumptions:\n\n{assumed}\n\nComputed, not measured"


def device_option(text: str) -> tuple[str, Device]:
    """NAME:TB/S:TFLOPS, such as H100:3.35:989."""
    name, bandwidth, flops = text.split(":")
    if min(float(bandwidth), float(flops)) <= 0:
        raise ValueError
    return name, Device(float(bandwidth) * 1e12, float(flops) * 1e12)


def positive(text: str) -> int:
    if int(text) <= 0:
        raise ValueError
    return int(text)


def main() -> None:
    parser = arms.parser(__doc__)
    parser.add_argument("--draft-vocab", type=positive, nargs="+", default=list(DRAFT_VOCABS), metavar="TOKENS")
    parser.add_argument("--context", type=positive, default=CONTEXT, help="tokens that each request attends over")
    parser.add_argument("--kv-bytes", type=int, default=BF16, choices=(1, 2), help="1: a KV cache in fp8")
    parser.add_argument("--device", type=device_option, nargs="+", metavar="NAME:TB/S:TFLOPS", help="not H200 and B200")
    args = parser.parse_args()
    devices, setting = dict(args.device or DEVICES), {"context": args.context, "kv_bytes": args.kv_bytes}
    cells = list(compute(args.draft_vocab, devices, **setting))
    sources = {name: source for name, (_, _, source) in PUBLISHED.items()}
    report = {"assumptions": ASSUMPTIONS, "sizes": sources, "devices": {n: d._asdict() for n, d in devices.items()}}
    shapes = {name: {"head": asdict(head), "target": asdict(target)} for name, (head, target, _) in PUBLISHED.items()}
    report |= setting | {"shapes": shapes, **provenance(), "cells": cells}
    for device in devices:
        print(arms.table(*published(report, device)), end="\n\n")
    arms.write_result(args.out, __doc__, report)


if __name__ == "__main__":
    main()
