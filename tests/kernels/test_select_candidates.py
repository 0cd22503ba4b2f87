"""select_candidates: kernel and twin against a loop over requests and candidates; the kernel's draws."""

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle_kernels.select_candidates import (
    Candidates,
    CandidateSelector,
    Drawing,
    select_candidates,
    select_candidates_torch,
)
from tests.sampling.statistics import limited
from tests.support.batches import KERNEL_DEVICE, POISON, moved

VOCAB, DRAFT_VOCAB = 97, 61
SHAPES = {
    "k": st.sampled_from([1, 2, 3, 5, 7, 11, 18]),
    "num_reqs": st.integers(1, 4),
    "num_candidates": st.sampled_from([1, 2, 3, 5, 16, 23]),
    "rank": st.sampled_from([1, 16, 64, 100]),
    "positions": st.sampled_from([1, 3, 18]),
    "gated": st.booleans(),
    "reduced": st.booleans(),
    "spoilt": st.sampled_from([0.0, math.nan, math.inf, -math.inf]),
    "seed": st.integers(0, 2**31),
}


def case(
    k: int,
    num_reqs: int,
    num_candidates: int,
    rank: int,
    positions: int,
    gated: bool = True,
    reduced: bool = False,
    spoilt: float = 0.0,
    seed: int = 0,
    idle: int = 0,
) -> tuple[Candidates, CandidateSelector, torch.Tensor | None]:
    """Candidates, selector and offsets; the last ``idle`` requests are padding of a graph: every sample is row 0."""
    gen = torch.Generator().manual_seed(seed)
    draft_vocab, samples = DRAFT_VOCAB if reduced else VOCAB, num_reqs * k
    ids = torch.stack([torch.randperm(draft_vocab, generator=gen)[:num_candidates] for _ in range(samples)])
    logits = torch.randn(samples, num_candidates, generator=gen)  # top-k orders equal ones in many ways
    logits[::2] += spoilt
    gates = torch.randn(samples, rank, generator=gen).bfloat16() if gated else None
    input_ids = torch.randint(VOCAB, (3 * samples,), generator=gen, dtype=torch.int32)
    sample_indices = torch.randperm(3 * samples, generator=gen)[:samples]
    sample_indices[samples - idle * k :] = 0
    selector = CandidateSelector(
        torch.randn(VOCAB, rank, generator=gen).bfloat16(),
        torch.randn(draft_vocab, rank, generator=gen).bfloat16(),
        None,
        torch.rand(positions, generator=gen),
        torch.rand(positions, generator=gen) + 0.5,
        num_candidates,
    )
    targets = torch.randperm(VOCAB, generator=gen)[:draft_vocab].sort().values
    offsets = targets - torch.arange(draft_vocab) if reduced else None
    return Candidates(ids, logits, gates, input_ids, sample_indices), selector, offsets


def one_by_one(
    candidates: Candidates, selector: CandidateSelector, offsets: torch.Tensor | None, k: int
) -> tuple[list[int], torch.Tensor]:
    """The rule itself, a token at a time: drafts of one request after the other, and every score."""
    scores, drafts = torch.zeros_like(candidates.logits), list[int]()
    for row, ids in enumerate(candidates.ids):
        previous = drafts[-1] if row % k else int(candidates.input_ids[candidates.sample_indices[row]])
        at = min(row % k, len(selector.edge_scale) - 1)
        gate = 1.0 if candidates.gates is None else candidates.gates[row].float()
        pair = selector.successor_codebook[ids].float() @ (selector.predecessor_codebook[previous].float() * gate)
        scores[row] = selector.unary_scale[at] * candidates.logits[row] + selector.edge_scale[at] * pair
        scores[row] = scores[row].where(scores[row].isfinite(), 0.0)
        draft_id = int(ids[scores[row].argmax()])
        drafts.append(draft_id if offsets is None else draft_id + int(offsets[draft_id]))
    return drafts, scores


def strided(num_reqs: int, k: int, device: str = "cpu") -> torch.Tensor:
    """The first columns of a wider buffer, as ``draft_tokens`` is in a schedule of K."""
    return torch.full((num_reqs, k + 2), POISON, dtype=torch.int64, device=device)[:, :k]


@pytest.mark.parametrize("fn", [select_candidates_torch, select_candidates])
@settings(max_examples=40, deadline=None)
@given(**SHAPES)
def test_drafts_and_scores_are_those_of_a_loop(fn, num_reqs: int, k: int, **shape: Any):
    candidates, selector, offsets = case(k, num_reqs, **shape)
    drafts, wanted = one_by_one(candidates, selector, offsets, k)
    device = KERNEL_DEVICE if fn is select_candidates else "cpu"
    out, scores = strided(num_reqs, k, device), torch.full_like(wanted, float("nan"), device=device)
    fn(out, *moved((candidates, selector, offsets), device), scores)
    assert out.flatten().tolist() == drafts
    assert (out._base[:, k:] == POISON).all()  # columns that this step does not draft
    torch.testing.assert_close(scores.cpu(), wanted, rtol=1e-4, atol=1e-4)


@triton.jit
def draw_by_its_arguments(scores, tokens, is_candidate, seed, position, column, temperature, USE_FP64):
    """The best candidate at temperature 0; else the one that seed, position and column name."""
    named = (seed + 3 * position + 5 * column) % tl.sum(is_candidate.to(tl.int32), axis=0)
    return tl.where(temperature == 0.0, tl.argmax(scores, axis=0), named.to(tl.int32))


@triton.jit
def draw_the_first_if_rounded(scores, tokens, is_candidate, seed, position, column, temperature, USE_FP64):
    """The first candidate where every score is one of float16's, else the second."""
    is_rounded = (scores.to(tl.float16).to(tl.float32) == scores) | ~is_candidate
    return tl.where(tl.min(is_rounded.to(tl.int32), axis=0) == 1, 0, 1)


def test_drafts_are_drawn_from_the_q_that_is_kept():
    """Not from scores of more digits: the rejection sampler takes q for the distribution that was drawn from."""
    candidates, selector, offsets = moved(case(2, 3, 5, 16, 4), KERNEL_DEVICE)
    tensors = moved(state(3, 2, 5, VOCAB, dtype=torch.float16), KERNEL_DEVICE)
    rows = torch.arange(3, device=KERNEL_DEVICE).repeat_interleave(2)
    drawing = Drawing(draw_the_first_if_rounded, rows, rows, *tensors, use_fp64=False)
    out, scores = strided(3, 2, KERNEL_DEVICE), torch.empty_like(candidates.logits)
    select_candidates(out, candidates, selector, offsets, scores, drawing)
    assert out.flatten().tolist() == candidates.ids[:, 0].tolist()
    assert (scores != scores.half()).any()


def state(
    max_num_reqs: int, k: int, num_candidates: int, vocab: int, top_p: float = 0.6, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    """Temperatures, seeds, limits, q and its candidates of every request that could be live, before any step."""
    temperature = torch.tensor([0.0, 0.7] * max_num_reqs)[:max_num_reqs]
    top_k = torch.tensor([vocab, 3] * max_num_reqs, dtype=torch.int32)[:max_num_reqs]
    top_ps = torch.tensor([1.0, 1.0, 1.0, top_p] * max_num_reqs)[:max_num_reqs]
    q = torch.full((max_num_reqs, k, vocab), -float("inf"), dtype=dtype)
    cached_ids = torch.zeros(max_num_reqs, k, num_candidates, dtype=torch.int64)
    return temperature, torch.arange(max_num_reqs) * 7, top_k, top_ps, q, cached_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter rounds bfloat16 its own way
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(("num_candidates", "top_p"), [(1, 0.6), (5, 0.6), (16, 0.6), (5, 0.0)])
def test_drawing_leaves_the_q_of_this_step_and_nothing_else(
    num_candidates: int, top_p: float, reduced: bool, dtype: torch.dtype
):
    """Three steps: K, fewer, K again. Requests come in another order, two rows of the state stay idle."""
    max_num_reqs, max_k = 5, 4
    tensors = moved(state(max_num_reqs, max_k, num_candidates, VOCAB, top_p, dtype), KERNEL_DEVICE)
    temperature, seeds, top_k, top_ps, q, _ = tensors
    wanted = q.clone()
    for step, (k, rows) in enumerate(((4, [3, 0, 1]), (2, [1, 3, -1]), (4, [3, -1, 0]))):
        parts = case(k, 3, num_candidates, 16, 4, reduced=reduced, seed=step, idle=rows.count(-1) and 1)
        candidates, selector, offsets = moved(parts, KERNEL_DEVICE)
        idx_mapping = torch.tensor(rows, device=KERNEL_DEVICE).repeat_interleave(k)
        positions = torch.arange(3 * k, device=KERNEL_DEVICE) + 11
        drawing = Drawing(draw_by_its_arguments, idx_mapping, positions, *tensors, use_fp64=False)
        out, scores = strided(3, k, KERNEL_DEVICE), torch.empty_like(candidates.logits)
        select_candidates(out, candidates, selector, offsets, scores, drawing)

        def choose(scored: torch.Tensor, column: int, rows=rows, positions=positions, k=k) -> torch.Tensor:
            """The same from the request's own numbers; an idle request has temperature 0."""
            live = [row if row >= 0 else 0 for row in rows]
            named = (seeds[live] + 3 * positions.view(3, k)[:, column] + 5 * column) % num_candidates
            is_greedy = (temperature[live] == 0) | (torch.tensor(rows, device=scored.device) < 0)
            return torch.where(is_greedy, scored.argmax(-1), named)

        right, right_scores = strided(3, k, KERNEL_DEVICE), torch.empty_like(scores)
        select_candidates_torch(right, candidates, selector, offsets, right_scores, choose)
        assert out.tolist() == right.tolist()
        torch.testing.assert_close(scores, right_scores, rtol=1e-4, atol=1e-4)
        targets = candidates.ids if offsets is None else candidates.ids + offsets[candidates.ids]
        for req, row in enumerate(rows):
            if row >= 0:
                of_req = slice(req * k, (req + 1) * k)
                wanted[row, :k] = -float("inf")
                sampling = float(temperature[row]), int(top_k[row]), max(float(top_ps[row]), 1e-9)
                kept = limited(scores[of_req], *sampling) if sampling[0] else scores[of_req]  # greedy: no limits
                kept = (kept - kept.amax(-1, keepdim=True)).to(dtype)
                wanted[row, :k] = wanted[row, :k].scatter(1, targets[of_req], kept)
        assert torch.equal(q, wanted), step
    assert torch.isinf(q[[2, 4]]).all()
