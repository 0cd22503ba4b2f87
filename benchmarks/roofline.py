"""The bytes that one draft step of a decode batch moves at least, whatever was accepted. No measurement.

Weights once a forward (norms, biases and embedding rows left out); P-EAGLE: 2K rows a request in the layers, K + 1 in
``fc``. EAGLE-3: K forwards of one layer, of one row a request each (vLLM's first has K + 1). Keys, values and logits
are left out.
"""

from benchmarks.shapes import NUM_AUX, HeadShape

BF16 = 2  # bytes


def draft_step_roofline(head: HeadShape, k: int, batch: int, *, parallel: bool) -> dict[str, int]:
    """Bytes to and from the device's memory, by part of the step.

    Args:
        k: drafts of each request.
        batch: requests.
        parallel: one forward of the P-EAGLE head; False: K forwards of an EAGLE-3 head of the same width.
    """
    weights, forwards = head.weights(parallel), 1 if parallel else k
    captured, rows = (batch * (k + 1), 2 * batch * k) if parallel else (batch, batch * k)
    return {
        "fc": BF16 * weights["fc"],
        "layers": BF16 * forwards * weights["layers"],
        "lm_head": BF16 * forwards * weights["lm_head"],
        "hidden states": BF16 * (NUM_AUX * captured + rows) * head.target.hidden_size,
    }
