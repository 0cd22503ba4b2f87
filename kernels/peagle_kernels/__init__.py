"""The draft batch of P-EAGLE: its geometry (``geometry``) and the two kernels that build it.

Imports torch and triton only. Each kernel stands beside a plain torch twin, which is its
specification and its CPU path.
"""

from peagle_kernels.batch import DraftBuffers, KVGroups, TargetBatch
from peagle_kernels.broadcast import broadcast, broadcast_torch, broadcast_triton
from peagle_kernels.expand import DraftStep, Layout, expand, expand_torch, expand_triton

__all__ = [
    "DraftBuffers",
    "DraftStep",
    "KVGroups",
    "Layout",
    "TargetBatch",
    "broadcast",
    "broadcast_torch",
    "broadcast_triton",
    "expand",
    "expand_torch",
    "expand_triton",
]
