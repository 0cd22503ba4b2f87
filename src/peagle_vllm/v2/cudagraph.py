"""Which draft batches get a CUDA graph, and the manager that captures and picks them.

A decode batch of n requests drafts in the static layout, ``L`` rows each; a graph holds one (n, L). The rule:

* L is ``K_max + max(K, 1)`` for each K that the configuration can ask for: ``num_speculative_tokens``, or the entries
  of ``num_speculative_tokens_per_batch_size``.
* For each such K the request counts n are those for which the target captures a decode graph of its own: 1 + K rows
  a request, or any number up to that under adaptive verification. A graph of the drafter is L rows a request, so the
  captured range grows by up to K x max_num_seqs; it is cut at max_num_batched_tokens.
* A batch of n requests that drafts K tokens is replayed on the least L that holds K and the least n that holds it.

vLLM's own manager would take its sizes from ``cudagraph_capture_sizes``, which end where the target's rows end.
"""

import copy
from collections.abc import Callable, Iterable

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from peagle_kernels import geometry

Shape = tuple[int, int]  # (requests, rows a request)


def asked_depths(vllm_config: VllmConfig) -> list[int]:
    """Every K that a step of this configuration can draft, 0 included where the schedule has it."""
    spec, max_k = vllm_config.speculative_config, vllm_config.num_speculative_tokens
    assert spec is not None
    if not spec.uses_dynamic_speculative_decoding():
        return [max_k]
    schedule = build_dynamic_sd_schedule_lookup(
        spec.num_speculative_tokens_per_batch_size,
        vllm_max_batch_size=vllm_config.scheduler_config.max_num_seqs,
        vllm_num_speculative_tokens=max_k,
    )
    return sorted(set(schedule[1:]))


def target_request_counts(sizes: Iterable[int], max_size: int, num_query: int, max_num_seqs: int) -> list[int]:
    """Request counts of the target's decode graphs: each capture size, rounded up to whole requests.

    Args:
        sizes: ``cudagraph_capture_sizes``, in tokens.
        max_size: ``max_cudagraph_capture_size``, in tokens.
        num_query: rows that a request verifies.
    """
    counts = {-(-size // num_query) for size in sizes}
    return sorted(n for n in counts if n <= max_num_seqs and n * num_query <= max_size)


def varlen_request_counts(sizes: Iterable[int], num_query: int, max_num_seqs: int) -> list[int]:
    """The same under adaptive verification, whose graphs take one row a request at worst."""
    return sorted({min(size, max_num_seqs) for size in sizes if size <= max_num_seqs * num_query})


def draft_shapes(vllm_config: VllmConfig) -> list[Shape]:
    """Every shape to capture, by the rule above, fewest rows first."""
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    spec, max_k, shapes = vllm_config.speculative_config, vllm_config.num_speculative_tokens, set()
    assert spec is not None
    sizes, max_size = compilation.cudagraph_capture_sizes or [], compilation.max_cudagraph_capture_size or 0
    for k in asked_depths(vllm_config):
        if spec.enable_adaptive_verification:
            counts = varlen_request_counts(sizes, 1 + k, scheduler.max_num_seqs)
        else:
            counts = target_request_counts(sizes, max_size, 1 + k, scheduler.max_num_seqs)
        length = geometry.static_length(max_k, k)
        shapes |= {(n, length) for n in counts if n * length <= scheduler.max_num_batched_tokens}
    return sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))


def draft_attention_config(vllm_config: VllmConfig) -> VllmConfig:
    """A copy in which the drafter's attention builders find the drafter's own batches.

    They size buffers by the largest captured batch, and treat requests wider than ``1 + num_speculative_tokens``
    as prefills: a static request has up to 2K rows.
    """
    config = copy.copy(vllm_config)
    config.speculative_config = copy.copy(vllm_config.speculative_config)
    assert config.speculative_config is not None
    config.speculative_config.num_speculative_tokens = 2 * vllm_config.num_speculative_tokens - 1
    if shapes := draft_shapes(vllm_config):
        config.compilation_config = copy.copy(vllm_config.compilation_config)
        sizes = sorted({n * length for n, length in shapes})
        config.compilation_config.cudagraph_capture_sizes = sizes
        config.compilation_config.max_cudagraph_capture_size = sizes[-1]
    return config


class DraftCudaGraphManager(CudaGraphManager):
    """Captures and replays the draft step, one FULL graph for each of ``draft_shapes``."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, cudagraph_mode: CUDAGraphMode):
        max_k = vllm_config.num_speculative_tokens
        self._lengths: list[int] = []  # captured L, ascending
        super().__init__(vllm_config, device, cudagraph_mode, geometry.static_length(max_k, max_k))

    def _init_candidates(self) -> None:
        """Fill vLLM's two tables: what to capture, and what can serve a batch of so many rows."""
        if not self.cudagraph_mode:
            return
        descs = [
            BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.FULL, num_tokens=n * length, num_reqs=n, uniform_token_count=length
            )
            for n, length in draft_shapes(self.vllm_config)
        ]
        if not descs:
            return
        self._capture_descs[CUDAGraphMode.FULL] = descs[::-1]  # the largest first: later ones fit into its memory
        self._lengths = sorted({length for _, length in draft_shapes(self.vllm_config)})
        for num_tokens in range(descs[-1].num_tokens + 1):
            enough = [desc for desc in descs if desc.num_tokens >= num_tokens]
            least = {desc.uniform_token_count: desc for desc in reversed(enough)}
            self._candidates[(num_tokens, 0)] = list(least.values())

    def static_length(self, num_speculative_tokens: int) -> int:
        """The least captured L that holds a step of this K; L of the layout itself where none is captured."""
        needed = geometry.static_length(self.vllm_config.num_speculative_tokens, num_speculative_tokens)
        return next((length for length in self._lengths if length >= needed), needed)

    def capture_drafts(self, prepare: Callable[[BatchExecutionDescriptor], Callable[[], None]]) -> None:
        """Capture every shape.

        Args:
            prepare: fills the persistent buffers for a dummy batch of this shape, outside the graph, and returns
                what the graph records.
        """

        def create_forward_fn(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
            draft = prepare(desc)
            return lambda _mode: draft()

        self.capture(create_forward_fn, "Capturing P-EAGLE draft CUDA graphs")
