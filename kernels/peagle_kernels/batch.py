"""What goes into and comes out of ``expand``: the target's batch, the layout and the draft's buffers."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch


def as_arrays(batch: Any) -> Any:
    """A dataclass of CPU tensors with NumPy views in their place. Staging stays: NumPy has no bfloat16."""
    arrays = object.__new__(type(batch))
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor) and field.name != "staging":
            value = value.numpy()
        object.__setattr__(arrays, field.name, value)
    return arrays


@dataclass
class TargetBatch:
    """One finished target step, as vLLM's runners hold it.

    The next token of request ``b`` is ``last_sampled[idx_mapping[b]]`` where
    ``num_sampled[b] > 0``; elsewhere (a prefill chunk that is not the last)
    ``next_prefill_tokens[idx_mapping[b]]``.
    """

    input_ids: torch.Tensor  # [num_target_rows] int
    positions: torch.Tensor  # [num_target_rows] int64
    query_start_loc: torch.Tensor  # [>= num_reqs + 1] int32
    num_rejected: torch.Tensor  # [>= num_reqs] int32, refused draft tokens
    num_sampled: torch.Tensor  # [>= num_reqs] int32
    idx_mapping: torch.Tensor  # [>= num_reqs] int, row of the request state; -1 owns no blocks (dummy)
    last_sampled: torch.Tensor  # [max_num_reqs] int
    next_prefill_tokens: torch.Tensor  # [max_num_reqs] int
    num_reqs: int
    num_rows: int
    # What drafts are sampled with, by row of the request state. None: the caller samples by itself.
    temperature: torch.Tensor | None = None  # [max_num_reqs] float32
    seeds: torch.Tensor | None = None  # [max_num_reqs] int64


@dataclass
class KVGroups:
    """The draft layers' KV cache groups. Empty while memory is profiled."""

    block_tables: tuple[Any, ...]  # tensors or arrays, each [>= num_reqs, max_blocks] int32, batch order
    block_sizes: tuple[int, ...]  # tokens a block


@dataclass(frozen=True)
class DraftBuffers:
    """Persistent buffers that ``expand`` fills; their addresses never change.

    ``query_start_loc`` is an input of the ragged layout: it is the layout. Everything else is an output.
    """

    input_ids: torch.Tensor  # [max_rows] int32
    positions: torch.Tensor  # [max_rows] int64
    row_map: torch.Tensor  # [max_rows] int32: staging row, MASK_ROW or PAD_ROW
    slot_mappings: torch.Tensor  # [num_groups, max_rows] int64
    query_start_loc: torch.Tensor  # [max_num_reqs + 1] int32
    seq_lens: torch.Tensor  # [max_num_reqs] int32
    sample_indices: torch.Tensor  # [max_num_reqs * K_max] int64, draft row of each sample
    sample_positions: torch.Tensor  # [max_num_reqs * K_max] int64, position before the sampled token
    sample_req: torch.Tensor  # [max_num_reqs * K_max] int64, idx_mapping of each sample; -1 is inert
    staging: torch.Tensor  # [max_staging_rows, sum of aux widths], captured hidden states side by side
    temperature: torch.Tensor  # [max_num_reqs] float32, by row of the request state
    seeds: torch.Tensor  # [max_num_reqs] int64, likewise

    @cached_property
    def arrays(self) -> "DraftBuffers":
        """The same memory as NumPy arrays; CPU tensors only."""
        return as_arrays(self)

    @classmethod
    def allocate(
        cls,
        *,
        max_rows: int,
        max_num_reqs: int,
        max_speculative_tokens: int,
        max_staging_rows: int,
        staging_width: int,
        num_groups: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "DraftBuffers":
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        max_samples = max_num_reqs * max_speculative_tokens
        return cls(
            input_ids=zeros(max_rows, dtype=torch.int32),
            positions=zeros(max_rows),
            row_map=zeros(max_rows, dtype=torch.int32),
            slot_mappings=zeros(num_groups, max_rows),
            query_start_loc=zeros(max_num_reqs + 1, dtype=torch.int32),
            seq_lens=zeros(max_num_reqs, dtype=torch.int32),
            sample_indices=zeros(max_samples),
            sample_positions=zeros(max_samples),
            sample_req=zeros(max_samples).fill_(-1),
            staging=zeros(max_staging_rows, staging_width, dtype=dtype),
            temperature=zeros(max_num_reqs, dtype=torch.float32),
            seeds=zeros(max_num_reqs),
        )


@dataclass(frozen=True)
class Layout:
    """How many draft rows each request gets.

    Ragged (``static_length`` 0): ``DraftBuffers.query_start_loc`` holds the starts, staging row i is target row i,
    and a request has as many samples as the step drafts.

    Static: every request gets ``static_length`` rows; staging is compact, ``staging_length`` = K_max + 1 rows a
    request; and a request has room for ``static_length - K_max`` samples, of which a step that drafts fewer leaves
    the last ones inert. So one shape, and one CUDA graph, serves every K of a step.
    """

    num_rows: int  # draft rows to fill, those of padding requests and beyond included
    num_reqs_padded: int  # requests to fill; from num_reqs on they are padding
    static_length: int = 0
    staging_length: int = 0

    @property
    def num_staging_rows(self) -> int:
        """Rows of compact staging."""
        return self.num_reqs_padded * self.staging_length

    def samples_per_req(self, num_speculative_tokens: int) -> int:
        """Samples that a request has room for in a step that drafts ``num_speculative_tokens``."""
        return self.static_length - self.staging_length + 1 if self.static_length else num_speculative_tokens


@dataclass(frozen=True)
class DraftStep:
    """What does not change with the batch."""

    num_speculative_tokens: int  # K of this step, 0 included
    max_model_len: int
    mask_token_id: int
