"""Which draft batches get a CUDA graph, and the manager that captures them.

A batch whose requests all decode is drafted in the static layout from one FULL graph, a ``Shape``. A batch with a
prefill in it is drafted in the ragged layout; the drafter's forward is then a PIECEWISE graph of so many rows, as
vLLM's own speculators run it. The rule:

* K is what the configuration can ask for: ``num_speculative_tokens``, or the entries of
  ``num_speculative_tokens_per_batch_size``. A batch larger than the one before it has a prefill in it, but for prompts
  that are cached: so a step with a smaller K than the drafts that it verified needs no graph.
* The request counts n are those of the target's own decode graphs, continued in steps of a sixteenth up to
  max_num_seqs, or to what max_num_batched_tokens holds: ``cudagraph_capture_sizes`` bounds the target's rows, not
  the requests that draft. A schedule captures the counts that its K can meet.
* The rows of PIECEWISE graphs are ``cudagraph_capture_sizes``, continued by K x max_num_seqs, or as far as the FULL
  graphs if that is more; then by half of that, room for prefills in a batch of as many decodes.
* A batch gets the graph with the fewest rows that holds it.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu.attn_utils import AttentionCGSupportInfo
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from peagle_kernels import geometry
from peagle_kernels.layout import DraftBatch, ragged_lengths, starts_of
from peagle_vllm.serving import warn_once

ROWS_STEP, REQS_STEP = 16, 8  # vLLM's own steps between capture sizes


class Shape(NamedTuple):
    """A FULL graph: of so many requests, which have verified at most K drafts each, and draft at most K."""

    num_reqs: int
    num_k: int

    @property
    def length(self) -> int:
        """Draft rows of a request."""
        return geometry.static_length(self.num_k, self.num_k)

    @property
    def num_rows(self) -> int:
        return self.num_reqs * self.length

    @property
    def num_staging_rows(self) -> int:
        return self.num_reqs * (self.num_k + 1)


@dataclass(frozen=True)
class DraftGraphs:
    decode: tuple[Shape, ...] = ()  # FULL graphs, those with fewer rows first
    mixed: tuple[int, ...] = ()  # rows of PIECEWISE graphs, ascending

    @property
    def cudagraph_mode(self) -> CUDAGraphMode:
        """vLLM's word for what is captured."""
        if self.decode:
            return CUDAGraphMode.FULL_AND_PIECEWISE if self.mixed else CUDAGraphMode.FULL_DECODE_ONLY
        return CUDAGraphMode.PIECEWISE if self.mixed else CUDAGraphMode.NONE

    @property
    def max_rows(self) -> int:
        """Draft rows of the largest graph."""
        return max((*(shape.num_rows for shape in self.decode), *self.mixed), default=0)

    @property
    def max_staging_rows(self) -> int:
        """Verified rows of the largest FULL graph."""
        return max((shape.num_staging_rows for shape in self.decode), default=0)

    def within(self, max_rows: int, max_staging_rows: int) -> "DraftGraphs":
        """Those that buffers of so many rows hold."""
        decode = (s for s in self.decode if s.num_rows <= max_rows and s.num_staging_rows <= max_staging_rows)
        return DraftGraphs(tuple(decode), tuple(num_rows for num_rows in self.mixed if num_rows <= max_rows))

    def decode_graph(self, num_reqs: int, num_k: int) -> Shape | None:
        """The graph with the fewest rows that holds ``num_reqs`` requests of ``num_k`` verified drafts and new ones."""
        return next((shape for shape in self.decode if shape.num_k >= num_k and shape.num_reqs >= num_reqs), None)

    def dispatch(
        self,
        num_scheduled: np.ndarray,
        num_target_rows: int,
        num_k: int,
        *,
        max_k: int,
        max_num_tokens: int,
        max_model_len: int,
    ) -> tuple[DraftBatch, np.ndarray, BatchExecutionDescriptor | None]:
        """Shape and graph of a batch that drafts ``num_k`` of at most ``max_k`` tokens a request.

        Args:
            num_scheduled: [num_reqs] verified rows, an upper bound under adaptive verification.
            num_target_rows: verified rows of all requests.
            max_num_tokens: max_num_batched_tokens.

        Returns:
            The batch, padded to the graph; [num_reqs + 1] int32 draft rows of each request; the graph, None: eager.
        """
        num_reqs, num_verified = len(num_scheduled), int(num_scheduled.max()) - 1
        length = geometry.static_length(num_verified, num_k)
        # A graph of another K of a schedule can be wider than this step asks for: 2K at most.
        fits = 2 * max_k <= max_model_len and num_verified <= max_k
        if shape := self.decode_graph(num_reqs, max(num_verified, num_k)) if fits else None:
            num_verified, length = shape.num_k, shape.length
        # Without a graph, requests that verified less would have rows for nothing.
        alike = fits and length * num_reqs <= max_num_tokens and num_scheduled.min() > num_verified
        if is_static := shape is not None or alike:
            starts = np.arange(num_reqs + 1, dtype=np.int32) * length
        else:
            lengths = ragged_lengths(num_scheduled, num_k, max_model_len)
            if lengths.sum() > max_num_tokens:
                # Only vLLM's profile run and warm-up leave the drafts no room, and nobody reads those. Each request
                # keeps its last rows, K at least, so every draft is made.
                lengths = np.minimum(lengths, np.diff(np.arange(num_reqs + 1) * max_num_tokens // num_reqs))
            starts = starts_of(lengths)
        num_rows = int(starts[-1])
        captured = None if shape else next((rows for rows in self.mixed if rows >= num_rows), None)
        graph = _full(shape) if shape else _piecewise(captured) if captured else None
        batch = DraftBatch(
            num_reqs,
            num_target_rows,
            num_k,
            num_rows=graph.num_tokens if graph else num_rows,
            num_reqs_padded=shape.num_reqs if shape else num_reqs,
            static_length=length if is_static else 0,
            staging_length=num_verified + 1 if is_static else 0,
        )
        return batch, starts, graph


NO_GRAPHS = DraftGraphs()


def draft_graphs(vllm_config: VllmConfig, cudagraph_mode: CUDAGraphMode) -> DraftGraphs:
    """Every graph to capture, by the rule above; of the kinds that the target's ``cudagraph_mode`` has."""
    if vllm_config.speculative_config.enforce_eager:
        return NO_GRAPHS
    decode = _decode_shapes(vllm_config) if cudagraph_mode.decode_mode() == CUDAGraphMode.FULL else set()
    full_rows = max((shape.num_rows for shape in decode), default=0)
    mixed = _mixed_sizes(vllm_config, full_rows) if cudagraph_mode.mixed_mode() == CUDAGraphMode.PIECEWISE else []
    return DraftGraphs(tuple(sorted(decode, key=lambda shape: (shape.num_rows, shape))), tuple(mixed))


def supported(graphs: DraftGraphs, backends: AttentionCGSupportInfo, has_pieces: bool) -> DraftGraphs:
    """Those of ``graphs`` that its attention backends can have, and the drafter in captured pieces (``has_pieces``)."""
    if graphs.decode and backends.min_cg_support.value < AttentionCGSupport.UNIFORM_BATCH.value:
        backend = backends.min_cg_attn_backend
        warn_once(f"P-EAGLE drafts without a full CUDA graph: its attention backend ({backend}) does not support one")
        graphs = replace(graphs, decode=())
    return graphs if has_pieces else replace(graphs, mixed=())


def continued(sizes: Iterable[int], limit: int, step: int) -> list[int]:
    """``sizes`` cut at ``limit``, then on in steps of a sixteenth, at least ``step``, to ``limit`` itself."""
    extended = sorted({min(size, limit) for size in sizes})
    while extended and extended[-1] < limit:
        extended.append(min(limit, extended[-1] + max(step, extended[-1] // 16 // step * step)))
    return extended


def _decode_shapes(vllm_config: VllmConfig) -> set[Shape]:
    max_num_seqs, max_k = vllm_config.scheduler_config.max_num_seqs, vllm_config.num_speculative_tokens
    schedule = vllm_config.speculative_config.num_speculative_tokens_per_batch_size or [(1, max_num_seqs, max_k)]
    depths = build_dynamic_sd_schedule_lookup(schedule, max_num_seqs, max_k)  # by requests, from index 1 on
    counts = {k: _request_counts(vllm_config, k) for k in set(depths[1:])}
    shapes = set()
    for num_reqs, k in enumerate(depths[1:], start=1):
        if (at := bisect_left(counts[k], num_reqs)) < len(counts[k]):
            shapes.add(Shape(counts[k][at], k))
    return shapes


def _request_counts(vllm_config: VllmConfig, num_k: int) -> list[int]:
    """Request counts of the decode graphs of a step that drafts ``num_k`` tokens, ascending."""
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    limit = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens // Shape(1, num_k).length)
    # The target's graphs are 1 + K rows a request; under adaptive verification one row a request at worst.
    rows = 1 if vllm_config.speculative_config.enable_adaptive_verification else 1 + num_k
    return continued((-(-size // rows) for size in compilation.cudagraph_capture_sizes or []), limit, REQS_STEP)


def _mixed_sizes(vllm_config: VllmConfig, full_rows: int) -> list[int]:
    """Rows of the PIECEWISE graphs, ascending. ``full_rows``: of the largest FULL graph."""
    sizes, scheduler = vllm_config.compilation_config.cudagraph_capture_sizes or [], vllm_config.scheduler_config
    extended = max(sizes, default=0) + vllm_config.num_speculative_tokens * scheduler.max_num_seqs
    reach = -(-max(extended, full_rows) // ROWS_STEP) * ROWS_STEP
    return continued(sizes, min(reach + reach // 2, scheduler.max_num_batched_tokens), ROWS_STEP)


class DraftCudaGraphManager(CudaGraphManager):
    """Captures the graphs of the draft step and replays them."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, shapes: DraftGraphs):
        self.shapes = shapes
        super().__init__(vllm_config, device, shapes.cudagraph_mode, decode_query_len=1)  # for vLLM's sizes only

    def _init_candidates(self) -> None:
        """Say what to capture. vLLM's own sizes would end where the target's rows end."""
        # The largest first: later ones fit into its memory.
        full = [_full(shape) for shape in reversed(self.shapes.decode)]
        piecewise = [_piecewise(num_rows) for num_rows in reversed(self.shapes.mixed)]
        for mode, descs in ((CUDAGraphMode.PIECEWISE, piecewise), (CUDAGraphMode.FULL, full)):
            if descs:
                self._capture_descs[mode] = descs

    @property
    def captured(self) -> DraftGraphs:
        """What can be replayed: nothing before capture."""
        return self.shapes if self._graphs_captured else NO_GRAPHS


@cache
def _full(shape: Shape) -> BatchExecutionDescriptor:
    num_reqs, length = shape.num_reqs, shape.length
    return BatchExecutionDescriptor(CUDAGraphMode.FULL, shape.num_rows, num_reqs, uniform_token_count=length)


@cache
def _piecewise(num_rows: int) -> BatchExecutionDescriptor:
    return BatchExecutionDescriptor(cg_mode=CUDAGraphMode.PIECEWISE, num_tokens=num_rows, num_reqs=None)
