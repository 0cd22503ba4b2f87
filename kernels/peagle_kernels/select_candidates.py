"""select_candidates: choose a request's K draft tokens from the candidates of each position, left to right.

Position i chooses among M candidates, given the token p chosen before it (the bonus token for the first):

    score(x) = unary_scale[i] * logit_i(x) + edge_scale[i] * sum_r A[p, r] * g_i[r] * B[x, r]

A and B are the selector's codebooks, g_i the projected hidden state of position i (1 where it has no projection).
DFlash2's selector is this with both scales 1, DSpark's Markov table without the projection too.

A score that is NaN or infinite, as of a head whose numbers overflow, counts as 0: a draft must be drawn from a
distribution, or vLLM's rejection sampler emits token 0.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from peagle_kernels.dispatch import runs_twin


class CandidateSelector(NamedTuple):
    """The tensors of a sharpened head's candidate selector.

    Positions beyond ``len(edge_scale)`` take the last one's scales.
    """

    predecessor_codebook: Tensor  # A: [target vocabulary, rank]
    successor_codebook: Tensor  # B: [draft vocabulary, rank]
    hidden_projection: Tensor | None  # [rank, hidden_size]
    edge_scale: Tensor  # [positions] float32
    unary_scale: Tensor  # [positions] float32
    num_candidates: int  # M


class Candidates(NamedTuple):
    """The best draft tokens of every sampled row, S = requests x K rows, request-major, and what they depend on."""

    ids: Tensor  # [S, M] int64 in the draft vocabulary
    logits: Tensor  # [S, M] float32
    gates: Tensor | None  # [S, rank] projected hidden states; None: all 1
    input_ids: Tensor  # [draft rows] the draft batch's
    sample_indices: Tensor  # [S] int64 draft row of each sample; a request's first one holds its bonus token


Choice = Callable[[Tensor, int], Tensor]  # (scores [num_reqs, M], column) -> [num_reqs] index among the candidates


class Drawing(NamedTuple):
    """What probabilistic drafts need, and leave for the rejection sampler. Rows of the request state.

    ``draw`` is a Triton function (scores, token ids, mask, seed, position, column, temperature, use_fp64) -> index.
    """

    draw: Callable[..., tl.tensor]
    idx_mapping: Tensor  # [S] int64; -1 writes nothing but drafts
    positions: Tensor  # [S] int64, before the sampled token
    temperature: Tensor  # [max_num_reqs] float32
    seeds: Tensor  # [max_num_reqs] int64
    top_k: Tensor  # [max_num_reqs] int32
    top_p: Tensor  # [max_num_reqs] float32
    draft_logits: Tensor  # [max_num_reqs, K_max, target vocabulary], -inf but for candidates within the limits
    cached_ids: Tensor  # [max_num_reqs, K_max, M] int64, which entries of ``draft_logits`` may be finite
    use_fp64: bool


def select_candidates(
    out: Tensor,
    candidates: Candidates,
    selector: CandidateSelector,
    offsets: Tensor | None,
    scores: Tensor,
    draw: Drawing | Choice | None = None,
) -> None:
    """Draft tokens of every request.

    Args:
        out: [num_reqs, K] int64, receives target token ids.
        offsets: [draft vocabulary] target id minus draft id; None: the same ids.
        scores: [S, M] float32, receives the scores that were chosen from.
        draw: what the kernel draws with, or how the twin chooses; None: greedy drafts.
    """
    if not isinstance(draw, Drawing) and (draw or runs_twin(out)):
        return select_candidates_torch(out, candidates, selector, offsets, scores, draw)
    drawing = draw if isinstance(draw, Drawing) else None
    num_reqs, num_k = out.shape
    num_candidates, rank = candidates.ids.shape[1], selector.predecessor_codebook.shape[1]
    _select_candidates_kernel[(num_reqs,)](
        out,
        out.stride(0),
        candidates.ids,
        candidates.logits,
        candidates.gates,
        candidates.input_ids,
        candidates.sample_indices,
        selector.predecessor_codebook,
        selector.successor_codebook,
        selector.edge_scale,
        selector.unary_scale,
        offsets,
        scores,
        *(drawing[1:9] if drawing else (None,) * 8),
        *(drawing.draft_logits.stride()[:2] if drawing else (0, 0)),
        drawing.cached_ids.stride(0) if drawing else 0,
        num_k,
        len(selector.edge_scale) - 1,
        NUM_CANDIDATES=num_candidates,
        RANK=rank,
        BLOCK_CANDIDATES=triton.next_power_of_2(num_candidates),
        BLOCK_RANK=triton.next_power_of_2(rank),
        DRAW=drawing.draw if drawing else None,
        USE_FP64=drawing is not None and drawing.use_fp64,
    )


def select_candidates_torch(
    out: Tensor,
    candidates: Candidates,
    selector: CandidateSelector,
    offsets: Tensor | None,
    scores: Tensor,
    draw: Choice | None = None,
) -> None:
    """The meaning of ``select_candidates`` in plain torch, and what a CPU runs."""
    num_k, last = out.shape[1], len(selector.edge_scale) - 1
    previous = candidates.input_ids[candidates.sample_indices[::num_k]]
    gates = () if candidates.gates is None else candidates.gates.view(*out.shape, -1).unbind(1)
    columns = (part.view(*out.shape, -1).unbind(1) for part in (candidates.ids, candidates.logits, scores))
    for column, (ids, logits, scored) in enumerate(zip(*columns, strict=True)):
        at = min(column, last)
        predecessor = F.embedding(previous, selector.predecessor_codebook).float()
        if gates:
            predecessor = predecessor * gates[column]
        successors = F.embedding(ids, selector.successor_codebook).float()
        pair = torch.bmm(successors, predecessor[:, :, None])[:, :, 0]
        torch.add(selector.unary_scale[at] * logits, selector.edge_scale[at] * pair, out=scored)
        scored.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        index = scored.argmax(dim=-1) if draw is None else draw(scored, column)
        chosen = ids.gather(1, index[:, None])[:, 0]
        previous = chosen if offsets is None else chosen + offsets[chosen]
        out[:, column] = previous


@triton.jit
def within_limits(scores, temperature, top_k, top_p):
    """Scores, -inf where a candidate is not in the request's top-k, and among those not in its top-p.

    Equal scores are kept or dropped together. Greedy requests have no limits: vLLM's SamplingParams resets theirs.
    """
    scaled = scores / tl.where(temperature == 0.0, 1.0, temperature)
    better = scaled[None, :] > scaled[:, None]  # [m, other]
    kept = tl.sum(better.to(tl.int32), axis=1) < top_k
    weight = tl.where(kept, tl.exp(scaled - tl.max(scaled, axis=0)), 0.0)
    before = tl.sum(tl.where(better, weight[None, :], 0.0), axis=1)
    mass = tl.where(top_p < 1.0, top_p * tl.sum(weight, axis=0), float("inf"))  # at 1 rounding drops none
    is_best = before == 0.0  # stays where a top-p is so small that a float32 has it as 0
    return tl.where(kept & (is_best | (before < mass)), scores, float("-inf"))


# Each K of a schedule is a step of its own: no variant may compile while requests wait.
@triton.jit(do_not_specialize=["num_k", "out_stride", "last_position"])
def _select_candidates_kernel(
    out_ptr,  # [num_reqs, K]
    out_stride,
    ids_ptr,  # [S, M]
    logits_ptr,  # [S, M]
    gates_ptr,  # [S, rank], or None
    input_ids_ptr,  # [draft rows]
    sample_indices_ptr,  # [S]
    predecessors_ptr,  # [target vocabulary, rank]
    successors_ptr,  # [draft vocabulary, rank]
    edge_scale_ptr,  # [positions]
    unary_scale_ptr,  # [positions]
    offsets_ptr,  # [draft vocabulary], or None
    scores_ptr,  # [S, M]
    idx_mapping_ptr,  # from here on: Drawing, or None
    positions_ptr,
    temperature_ptr,
    seeds_ptr,
    top_k_ptr,
    top_p_ptr,
    draft_logits_ptr,
    cached_ids_ptr,
    draft_logits_stride,
    draft_logits_column,
    cached_ids_stride,
    num_k,
    last_position,
    NUM_CANDIDATES: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_CANDIDATES: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    DRAW: tl.constexpr,
    USE_FP64: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, BLOCK_CANDIDATES)
    r = tl.arange(0, BLOCK_RANK)
    is_candidate, in_rank = m < NUM_CANDIDATES, r < RANK
    previous = tl.load(input_ids_ptr + tl.load(sample_indices_ptr + req * num_k)).to(tl.int64)
    for column in range(num_k):
        sample = req * num_k + column
        position = tl.minimum(column, last_position)
        predecessor = tl.load(predecessors_ptr + previous * RANK + r, mask=in_rank, other=0.0).to(tl.float32)
        if gates_ptr is not None:
            predecessor *= tl.load(gates_ptr + sample * RANK + r, mask=in_rank, other=0.0).to(tl.float32)
        candidate = sample * NUM_CANDIDATES + m
        ids = tl.load(ids_ptr + candidate, mask=is_candidate, other=0)
        successors = tl.load(
            successors_ptr + ids[:, None] * RANK + r[None, :], mask=is_candidate[:, None] & in_rank[None, :], other=0.0
        ).to(tl.float32)
        pair = tl.sum(successors * predecessor[None, :], axis=1)
        logits = tl.load(logits_ptr + candidate, mask=is_candidate, other=0.0)
        scores = tl.load(unary_scale_ptr + position) * logits + tl.load(edge_scale_ptr + position) * pair
        scores = tl.where(tl.abs(scores) < float("inf"), scores, 0.0)
        scores = tl.where(is_candidate, scores, float("-inf"))
        tl.store(scores_ptr + candidate, scores, mask=is_candidate)
        tokens = ids
        if offsets_ptr is not None:
            tokens += tl.load(offsets_ptr + ids, mask=is_candidate, other=0)

        if DRAW is None:
            chosen = tl.argmax(scores, axis=0)
        else:
            row = tl.load(idx_mapping_ptr + sample)
            is_live = row >= 0
            temperature = tl.load(temperature_ptr + row, mask=is_live, other=0.0)
            seed = tl.load(seeds_ptr + row, mask=is_live, other=0)
            before = tl.load(positions_ptr + sample)
            top_k = tl.load(top_k_ptr + row, mask=is_live, other=NUM_CANDIDATES)
            top_p = tl.load(top_p_ptr + row, mask=is_live, other=1.0)
            scores = within_limits(scores, temperature, top_k, top_p)
            # Drawn from what is kept, whatever its dtype. The best score is 0, near which rounding is finest.
            scores = (scores - tl.max(scores, axis=0)).to(draft_logits_ptr.dtype.element_ty).to(tl.float32)
            chosen = DRAW(scores, tokens, is_candidate, seed, before, column, temperature, USE_FP64)
            # The rejection sampler reads q here: -inf where the last step's candidates were, then this step's.
            kept = is_candidate & is_live
            cached = cached_ids_ptr + row * cached_ids_stride + column * NUM_CANDIDATES + m
            q = draft_logits_ptr + row * draft_logits_stride + column * draft_logits_column
            tl.store(q + tl.load(cached, mask=kept, other=0), float("-inf"), mask=kept)
            tl.debug_barrier()
            tl.store(q + tokens, scores, mask=kept)
            tl.store(cached, tokens, mask=kept)
        previous = tl.sum(tl.where(m == chosen, tokens, 0), axis=0)
        tl.store(out_ptr + req * out_stride + column, previous)
