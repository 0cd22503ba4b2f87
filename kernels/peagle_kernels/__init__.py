"""The draft batch of P-EAGLE: its geometry (``geometry``) and the two kernels that build it.

Imports torch, numpy and triton only. Each kernel has a plain torch twin, which is its specification.
"""

from peagle_kernels.batch import DraftBuffers, DraftStep, KVGroups, Layout, TargetBatch
from peagle_kernels.broadcast import broadcast, broadcast_numpy, broadcast_torch, broadcast_triton
from peagle_kernels.expand import expand, expand_numpy, expand_torch
from peagle_kernels.expand_kernel import expand_triton

__all__ = [
    "DraftBuffers",
    "DraftStep",
    "KVGroups",
    "Layout",
    "TargetBatch",
    "broadcast",
    "broadcast_numpy",
    "broadcast_torch",
    "broadcast_triton",
    "expand",
    "expand_numpy",
    "expand_torch",
    "expand_triton",
]
