"""The draft batch of P-EAGLE: its geometry (``geometry``), two kernels that build it, and two for its tokens.

Imports torch, NumPy and Triton only. Each kernel has a plain torch twin, which is its specification.
"""

from peagle_kernels.batch import DraftBuffers, KVGroups, TargetBatch, allocate_buffers
from peagle_kernels.gather_hidden import gather_hidden, gather_hidden_torch, gather_hidden_triton
from peagle_kernels.layout import DraftBatch
from peagle_kernels.lookup_drafts import (
    MAX_MATCH,
    OneHot,
    longest_match,
    lookup_drafts,
    lookup_drafts_torch,
    lookup_drafts_triton,
)
from peagle_kernels.prepare_inputs import prepare_inputs, prepare_inputs_torch, prepare_inputs_triton
from peagle_kernels.select_candidates import (
    Candidates,
    CandidateSelector,
    Drawing,
    select_candidates,
    select_candidates_torch,
    select_candidates_triton,
)

__all__ = [
    "MAX_MATCH",
    "CandidateSelector",
    "Candidates",
    "DraftBatch",
    "DraftBuffers",
    "Drawing",
    "KVGroups",
    "OneHot",
    "TargetBatch",
    "allocate_buffers",
    "gather_hidden",
    "gather_hidden_torch",
    "gather_hidden_triton",
    "longest_match",
    "lookup_drafts",
    "lookup_drafts_torch",
    "lookup_drafts_triton",
    "prepare_inputs",
    "prepare_inputs_torch",
    "prepare_inputs_triton",
    "select_candidates",
    "select_candidates_torch",
    "select_candidates_triton",
]
