"""How ``walk_edges`` draws a token for Model Runner V2: with vLLM's own noise, which its rejection sampler expects."""

import triton
import triton.language as tl
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax

try:
    from vllm.v1.worker.gpu.sample.gumbel import spec_step_seed
except ImportError:  # vLLM 0.32: one seed for all draft columns

    @triton.jit
    def spec_step_seed(seed, step):
        return seed


@triton.jit
def draw(scores, tokens, is_candidate, seed, position, column, temperature, USE_FP64: tl.constexpr):
    """Index of the token drawn from softmax(scores / temperature); the best one at temperature 0."""
    _, index = gumbel_noised_argmax(
        scores,
        tokens,
        is_candidate,
        spec_step_seed(seed, column),
        position,
        temperature,
        IS_DRAFTING=True,
        USE_FP64=USE_FP64,
    )
    return index
