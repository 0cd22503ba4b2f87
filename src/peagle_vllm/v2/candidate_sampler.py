"""Drafts on Model Runner V2 that are chosen among candidates, and drawn with vLLM's own noise."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax

from peagle_kernels import CandidateSelector, DraftBuffers, Drawing
from peagle_vllm.sampling.selection import select

try:
    from vllm.v1.worker.gpu.sample.gumbel import spec_step_seed
except ImportError:  # vLLM 0.32: one seed for all draft columns

    @triton.jit
    def spec_step_seed(seed, step):
        return seed


NUM_OTHERS = 1024  # columns of ``beside_others``


class CandidateSampler:
    """Chooses each draft token knowing the one before it."""

    def __init__(self, max_num_reqs: int, max_k: int, num_candidates: int, device: torch.device):
        self.selector: CandidateSelector | None = None  # None: drafts are the best tokens; set when the head is loaded
        shape = max_num_reqs, max_k, num_candidates
        self.scores = torch.zeros(shape, dtype=torch.float32, device=device)  # what the last tokens were chosen by
        # Which entries of ``draft_logits`` may be finite; discarded with it.
        self.cached_ids = torch.zeros(shape, dtype=torch.int64, device=device)

    def __call__(
        self,
        model: Any,
        hidden_states: torch.Tensor,
        drafts: torch.Tensor,
        buffers: DraftBuffers,
        draft_logits: torch.Tensor | None,
        use_fp64: bool,
        estimated: bool,
    ) -> torch.Tensor | None:
        """Write ``drafts``, [num_reqs, K] int64 target token ids.

        Args:
            model: the loaded head.
            hidden_states: [num_samples, hidden_size] of the sampled rows, after the head's last norm.
            draft_logits: receives the scores of probabilistic drafts; None: greedy ones.
            estimated: adaptive verification's estimator reads what these drafts were chosen by.

        Returns:
            [num_samples, M + NUM_OTHERS] float32, ``beside_others`` of the scores; None unless ``estimated``.
        """
        assert self.selector is not None
        samples = slice(0, len(hidden_states))
        scores = self.scores.view(-1, self.selector.num_candidates)[samples]
        drawing = None
        if draft_logits is not None:
            rows = buffers.sample_idx_mapping[samples], buffers.sample_pos[samples]
            sampling = buffers.temperature, buffers.seeds, buffers.top_k, buffers.top_p
            drawing = Drawing(draw, *rows, *sampling, draft_logits, self.cached_ids, use_fp64)
        candidates = select(model, self.selector, hidden_states, buffers, drafts, scores, drawing, estimated)
        return beside_others(scores, candidates.logits) if estimated else None


def beside_others(scores: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
    """Scores beside the tokens that are no candidates: the selector's distribution over the whole vocabulary.

    A selector reranks its candidates, and leaves the others what the head gives them. Among the candidates alone a row
    that is flat over the vocabulary would look surer than it is, and most of its drafts are rejected.

    Args:
        scores: [num_samples, M].
        log_probs: [num_samples, M] of the candidates, in the head's vocabulary.

    Returns:
        [num_samples, M + NUM_OTHERS] float32. The others stand in equal parts, since the estimator takes the largest
        column for the draft's own; at a temperature other than 1 they are as likely as equal tokens would be.
    """
    mass = log_probs.logsumexp(-1).clamp(max=-1e-6)  # all but 1 where rounding makes it 1
    others = scores.logsumexp(-1) + torch.log(-torch.expm1(mass)) - mass
    return torch.cat((scores, (others - math.log(NUM_OTHERS))[:, None].expand(-1, NUM_OTHERS)), dim=-1)


@triton.jit
def draw(scores, tokens, is_candidate, seed, position, column, temperature, USE_FP64: tl.constexpr):
    """Index of the token drawn from softmax(scores / temperature); the best one at temperature 0."""
    step_seed = spec_step_seed(seed, column)
    _, index = gumbel_noised_argmax(
        scores, tokens, is_candidate, step_seed, position, temperature, IS_DRAFTING=True, USE_FP64=USE_FP64
    )
    return index
