"""How Model Runner V2 draws a draft among candidates, and what adaptive verification reads of their scores."""

import math

import torch
import triton
import triton.language as tl
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax

try:
    from vllm.v1.worker.gpu.sample.gumbel import spec_step_seed
except ImportError:  # vLLM 0.32: one seed for all draft columns

    @triton.jit
    def spec_step_seed(seed, step):
        return seed


NUM_OTHERS = 1024  # columns of ``with_others``


def with_others(scores: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
    """The scores, then the other tokens': the selector's distribution over the whole vocabulary.

    Among the candidates alone a row that is flat over the vocabulary would look surer than it is.

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
