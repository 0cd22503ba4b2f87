"""The bytes that one draft step of a decode batch moves at least, whatever was accepted. No measurement.

Weights once a forward (norms, biases and embedding rows left out); P-EAGLE: 2K rows a request in the layers, K + 1 in
``fc``, K in the lm_head; keys and values of every request's context once a forward, their writes left out; logits
written once and read once. EAGLE-3: K forwards of one layer, of one row a request each (vLLM's first has K + 1).
"""

from benchmarks.shapes import HeadShape

CONTEXT = 2048  # tokens of a request
BF16 = 2  # bytes


def draft_step_roofline(
    head: HeadShape, k: int, batch: int, *, parallel: bool = True, context: int = CONTEXT
) -> dict[str, float]:
    """Bytes to and from the device's memory, by part of the step.

    Args:
        k: drafts of each request.
        batch: requests.
        parallel: one forward of the P-EAGLE head; False: K forwards of an EAGLE-3 head of the same width.
        context: tokens that each request attends over.
    """
    model, weights = head.target, head.weights(parallel)
    drafts, forwards = batch * k, 1 if parallel else k
    captured, rows = (batch * (k + 1), 2 * drafts) if parallel else (batch, drafts)
    keys = head.layers(parallel) * context * model.head_dim * model.num_key_value_heads  # of a request
    return {
        "fc": BF16 * weights["fc"],
        "layers": BF16 * forwards * weights["layers"],
        "lm_head": BF16 * forwards * weights["lm_head"],
        "hidden states": BF16 * (head.num_aux * captured + rows) * model.hidden_size,
        "attention": BF16 * forwards * batch * 2 * keys,
        "logits": 2 * BF16 * drafts * head.draft_vocab,
    }
