"""What training a head takes, for the published targets: ``python -m benchmarks.training_cost``. Arithmetic only."""

from dataclasses import replace

from benchmarks import arms, partition
from benchmarks.arms import Published
from benchmarks.floor import DEVICES, target_step_floor
from benchmarks.shapes import NUM_AUX, PUBLISHED

TARGETS = ("qwen3-8b", "qwen3-coder-30b", "gpt-oss-120b")
DEVICE = "H200"
TOKENS, EPOCHS, DEPTHS, CHUNK_ROWS = 100e6, 10, 8, 1024
REQUESTS, CONTEXT = 256, 2048  # answered at once; tokens that a token attends to, in the mean
DECODING, PREFILLING, TRAINING = 0.5, 0.4, 0.3  # assumed shares of what the device could do at best
ASSUMED = (
    f"Assumed, not measured: {TOKENS / 1e6:.0f} million tokens, all of them answers, in documents of {2 * CONTEXT:,} "
    "(those of gpt-oss-120b on UltraChat have a median of 3,891, says the P-EAGLE post of vLLM's blog); "
    f"{REQUESTS} requests answered at once at {DECODING:.0%} of the memory bandwidth, or of the FLOP rate where that "
    f"is the limit; {PREFILLING:.0%} of the FLOP rate for hidden states, {TRAINING:.0%} in training; {EPOCHS} epochs; "
    f"K = {DEPTHS}; chunks of {CHUNK_ROWS:,} rows; heads of 4 layers with the published widths, the whole vocabulary "
    f"and {NUM_AUX} hidden states; hours of one {DEVICE}, {DEVICES[DEVICE].bandwidth / 1e12:g} TB/s and "
    f"{DEVICES[DEVICE].flops / 1e12:g} TFLOP/s as published"
)


def row_flops(name: str, sampling: str) -> float:
    """Operations that training spends on one token of a document in one epoch, all its rows together.

    A row runs forward and, at twice that, backward; a real row's layers run forward once more, for they are
    checkpointed; the target's own logits, which are learned from, only forward.
    """
    head, target, _ = PUBLISHED[name]
    weights = replace(head, num_aux=NUM_AUX, draft_vocab=target.model.vocab).weights(parallel=True)
    rows = partition.num_rows(1_000_000, DEPTHS, sampling) / 1e6
    keys = CONTEXT + CHUNK_ROWS
    layers = 2 * weights["layers"] + head.layers(True) * keys * 4 * target.model.heads * target.model.head_dim
    logits = 2 * weights["lm_head"]
    return rows * (3 * (layers + logits) + logits) + layers + 3 * 2 * weights["fc"]


def cost(name: str) -> dict[str, float]:
    """GPU hours of each step, and bytes of the hidden states."""
    target, device = PUBLISHED[name][1], DEVICES[DEVICE]
    decoding = max(target_step_floor(target, 0, REQUESTS, context=CONTEXT).seconds(device)) / REQUESTS
    prefilling = target_step_floor(target, 0, 1, context=CONTEXT).seconds(device)[1]
    training = {of: EPOCHS * row_flops(name, of) / device.flops for of in partition.RATIOS}
    seconds = {"answers": decoding / DECODING, "states": prefilling / PREFILLING}
    seconds |= {of: one / TRAINING for of, one in training.items()}
    hours = {step: TOKENS * one / 3600 for step, one in seconds.items()}
    return hours | {"bytes": TOKENS * (NUM_AUX + 1) * target.model.hidden * 2}


def published() -> Published:
    """The table and what it assumes."""
    rows = []
    for name in TARGETS:
        found = cost(name)
        hours = [f"{found[step]:,.0f}" if found[step] >= 2 else f"{found[step]:.1f}" for step in ("answers", "states")]
        trained = [f"{found[of]:,.0f}" for of in partition.RATIOS]
        rows.append((name, *hours, f"{found['bytes'] / 1e12:.1f}", *trained))
    columns = (
        "target",
        "answers, h",
        "hidden states, h",
        "their disk, TB",
        "training, all depths, h",
        "training, COD, h",
    )
    return columns, rows, ASSUMED


if __name__ == "__main__":
    print(arms.table(*published()))
