"""What one draft step of a decode batch must move and compute. No measurement.

The bytes that V2's graph moves at least, whatever was accepted: weights once a forward (norms, biases and embedding
rows left out); 2K rows a request in the layers, K + 1 in ``fc``, K in the lm_head; keys and values of every request's
context once a forward, their writes left out; logits written once and read once. Beside P-EAGLE: EAGLE-3's K forwards
of one layer, of one row a request each, the least (vLLM's first has K + 1).
"""

from typing import NamedTuple

from benchmarks.shapes import HeadShape

CONTEXT = 2048  # tokens of a request
BF16 = 2  # bytes


class Cost(NamedTuple):
    """What one part of a step moves and computes."""

    bytes: float  # to and from the device's memory
    flops: float = 0  # a multiply and an add are two


def draft_step_roofline(
    head: HeadShape,
    k: int,
    batch: int,
    *,
    parallel: bool = True,
    context: int = CONTEXT,
) -> dict[str, Cost]:
    """The least that each part of a draft step of a decode batch moves and computes.

    Args:
        k: drafts of each request.
        batch: requests.
        parallel: one forward of the P-EAGLE head; False: K forwards of an EAGLE-3 head of the same width.
        context: tokens that each request attends over.
    """
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
