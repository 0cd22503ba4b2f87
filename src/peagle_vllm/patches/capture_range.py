"""On V1 a P-EAGLE draft batch is larger than the largest piecewise graph.

A decode batch of n requests verifies (K+1)n rows but drafts 2K*n, so the sizes of piecewise graphs grow by
K x max_num_seqs. Full graphs and the configuration keep vLLM's: FlashAttention 3 makes room for 32 splits of every
batch up to the largest size that the configuration has.
"""

import copy

from peagle_vllm.patches.ledger import Patch, members
from peagle_vllm.serving import is_peagle

PATCH = Patch(
    name="capture-range",
    runner="V1",
    depends_on={  # what is done with the sizes
        "vllm.v1.cudagraph_dispatcher": members(
            "CudagraphDispatcher", "_compute_bs_to_padded_graph_size dispatch _create_padded_batch_descriptor"
        ),
        "vllm.config.compilation": ("CompilationConfig.adjust_cudagraph_sizes_for_spec_decode",),
    },
)

MARK = "peagle_extends_capture"
"""Attribute of a CompilationConfig whose sizes are vLLM's own choice, for a P-EAGLE head on V1."""


def extended_sizes(sizes: list[int], num_k: int, max_num_seqs: int, max_num_tokens: int) -> list[int]:
    """Capture sizes (tokens, ascending) grown by the draft batches 2K*n up to K*max_num_seqs more.

    Request counts go in vLLM's own steps, so that the number of graphs stays comparable. New sizes are multiples of
    K+1: where the target has full graphs of decode batches, vLLM pads to no other.
    """
    largest, step = max(sizes), num_k + 1
    ceiling = min(largest + num_k * max_num_seqs, max_num_tokens) // step * step
    counts = [1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs + 1, 16), max_num_seqs]
    drafts = {-(-2 * num_k * n // step) * step for n in counts if n <= max_num_seqs}
    return sorted({*sizes, *(size for size in (*drafts, ceiling) if largest < size <= ceiling)})


@PATCH.wraps("vllm.config.vllm", "VllmConfig._set_cudagraph_sizes")
def _set_cudagraph_sizes(original, self, *args, **kwargs):
    """Mark the configurations whose sizes may grow."""
    config = self.compilation_config
    may_grow = is_peagle(self) and not self.use_v2_model_runner
    may_grow = may_grow and config.cudagraph_capture_sizes is None and config.max_cudagraph_capture_size is None
    original(self, *args, **kwargs)
    if may_grow:
        setattr(config, MARK, True)


@PATCH.wraps("vllm.v1.cudagraph_dispatcher", "CudagraphDispatcher.initialize_cudagraph_keys")
def initialize_cudagraph_keys(original, self, *args, **kwargs):
    """Give the target's dispatcher and the drafter's, which share piecewise graphs, the larger sizes."""
    from vllm.config import CUDAGraphMode

    config = self.vllm_config.compilation_config
    sizes = getattr(config, MARK, False) and config.cudagraph_capture_sizes
    if not sizes or config.cudagraph_mode.mixed_mode() != CUDAGraphMode.PIECEWISE:
        return original(self, *args, **kwargs)
    scheduler, num_k = self.vllm_config.scheduler_config, self.vllm_config.num_speculative_tokens
    extended = extended_sizes(sizes, num_k, scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    self.compilation_config = copy.copy(config)
    self.compilation_config.cudagraph_capture_sizes = extended
    self.compilation_config.max_cudagraph_capture_size = extended[-1]
    original(self, *args, **kwargs)
    full = self.cudagraph_keys[CUDAGraphMode.FULL]
    full.difference_update([key for key in full if key.num_tokens > sizes[-1]])
