"""limit_logits: the logits of probabilistic drafts, -inf where a token is not in its request's top-k and top-p.

In the sampler's order: temperature, then top-k, then top-p among those. Equal logits are kept or dropped together.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle_kernels.dispatch import runs_twin

BLOCK = 4096  # logits that a row's program reads at once


def limit_logits(logits: Tensor, idx_mapping: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Write -inf into ``logits``, in place.

    Args:
        logits: [num_samples, width] float.
        idx_mapping: [num_samples] int, the request of each row, of the tensors below; -1 is inert.
        temperature: [requests] float32; 0: greedy, whose best token stays.
        top_k: [requests] int32; ``width`` and more: no limit.
        top_p: [requests] float32; 1: no limit.
    """
    limit = limit_logits_torch if runs_twin(logits) else limit_logits_triton
    limit(logits, idx_mapping, temperature, top_k, top_p)


def limit_logits_torch(logits: Tensor, idx_mapping: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """The meaning of ``limit_logits`` in plain torch, and what a CPU runs."""
    width, rows = logits.shape[1], idx_mapping.clamp(min=0).long()
    heat, k, p = (numbers[rows, None] for numbers in (temperature, top_k, top_p))
    scaled = logits.float() / torch.where(heat == 0, 1.0, heat)
    ordered = scaled.sort(dim=-1, descending=True).values
    in_k = ordered >= ordered.gather(1, k.long().clamp(1, width) - 1)
    weight = torch.where(in_k, (ordered - ordered[:, :1]).exp(), 0.0)
    mass = torch.where(p < 1.0, p * weight.sum(-1, keepdim=True), torch.inf)  # at 1 rounding drops none
    kept = in_k & (weight.cumsum(-1) - weight < mass)
    least = torch.where(kept, ordered, torch.inf).amin(-1, keepdim=True).minimum(ordered[:, :1])
    logits.masked_fill_((scaled < least) & (idx_mapping >= 0)[:, None], -torch.inf)


def limit_logits_triton(logits: Tensor, idx_mapping: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """One launch, a program for each row, which returns at once without limits; meaning of ``limit_logits_torch``."""
    num_samples, width = logits.shape
    _limit_logits_kernel[(num_samples,)](
        logits, logits.stride(0), idx_mapping, temperature, top_k, top_p, WIDTH=width, BLOCK=BLOCK, num_warps=8
    )


@triton.jit
def _key(x):
    """A uint32 that grows with a float32."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    return tl.where(bits < 0, ~bits, bits ^ -(2**31)).to(tl.uint32, bitcast=True)


@triton.jit
def _read(logits_ptr, start, best, heat, WEIGHTED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Keys of a block's logits, and what each adds to a total: its weight, or 1."""
    at = start + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + at, mask=at < WIDTH, other=float("-inf")).to(tl.float32)
    return _key(x), tl.where(at < WIDTH, tl.exp((x - best) / heat) if WEIGHTED else 1.0, 0.0)


@triton.jit
def _below(logits_ptr, low, step, share, best, heat, WEIGHTED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Of the bounds low, low + step .. low + 7 * step how many have ``share`` or more above them: the first ones.

    Each thread adds up its own totals, eight at once, and they meet after the loop: a sum over the block for every
    bound inside it would be most of the work.
    """
    t0, t1, t2, t3 = (tl.zeros([BLOCK], tl.float32),) * 4
    t4, t5, t6, t7 = (tl.zeros([BLOCK], tl.float32),) * 4
    for start in range(0, WIDTH, BLOCK):
        key, part = _read(logits_ptr, start, best, heat, WEIGHTED, WIDTH, BLOCK)
        t0 += tl.where(key > low, part, 0.0)
        t1 += tl.where(key > low + step, part, 0.0)
        t2 += tl.where(key > low + step * 2, part, 0.0)
        t3 += tl.where(key > low + step * 3, part, 0.0)
        t4 += tl.where(key > low + step * 4, part, 0.0)
        t5 += tl.where(key > low + step * 5, part, 0.0)
        t6 += tl.where(key > low + step * 6, part, 0.0)
        t7 += tl.where(key > low + step * 7, part, 0.0)
    first = (tl.sum(t0) >= share).to(tl.uint32) + (tl.sum(t1) >= share) + (tl.sum(t2) >= share) + (tl.sum(t3) >= share)
    return first + (tl.sum(t4) >= share) + (tl.sum(t5) >= share) + (tl.sum(t6) >= share) + (tl.sum(t7) >= share)


@triton.jit
def _least(logits_ptr, low, best, heat, share, WEIGHTED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The least key, from ``low`` on, above which is less than ``share``: by eight at once, a row is never sorted.

    With ``WEIGHTED`` it is a share of the weight from ``low`` on, else a count.
    """
    high = _key(best)
    if WEIGHTED:
        whole = tl.zeros([BLOCK], tl.float32)
        for start in range(0, WIDTH, BLOCK):
            key, part = _read(logits_ptr, start, best, heat, True, WIDTH, BLOCK)
            whole += tl.where(key >= low, part, 0.0)
        share *= tl.sum(whole)
    while low < high:
        step = (high - low) // 8 + 1
        too_low = _below(logits_ptr, low, step, share, best, heat, WEIGHTED, WIDTH, BLOCK)
        high = tl.minimum(high, low + step * too_low)
        low = tl.where(too_low > 0, low + step * (too_low - 1) + 1, low)
    return low


@triton.jit
def _limit_logits_kernel(
    logits_ptr,  # [num_samples, WIDTH]
    logits_stride,
    idx_mapping_ptr,  # [num_samples]
    temperature_ptr,  # from here on: [requests]
    top_k_ptr,
    top_p_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + sample)
    if row < 0:
        return
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    if (top_k >= WIDTH) & (top_p >= 1.0):
        return
    logits_ptr += sample * logits_stride
    heat = tl.load(temperature_ptr + row)
    heat = tl.where(heat == 0.0, 1.0, heat)
    best = tl.full((), float("-inf"), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + at, mask=at < WIDTH, other=float("-inf")).to(tl.float32)
        best = tl.maximum(best, tl.max(x, axis=0))
    least = _key(tl.full((), float("-inf"), tl.float32))
    if top_k < WIDTH:
        least = _least(logits_ptr, least, best, heat, top_k.to(tl.float32), False, WIDTH, BLOCK)
    if top_p < 1.0:
        least = _least(logits_ptr, least, best, heat, top_p, True, WIDTH, BLOCK)
    least = tl.minimum(least, _key(best))  # a top-p so small that a float32 has it as 0 leaves the best token, too
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + at, mask=at < WIDTH, other=float("-inf")).to(tl.float32)
        tl.store(logits_ptr + at, float("-inf"), mask=(at < WIDTH) & (_key(x) < least))
