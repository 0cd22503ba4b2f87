"""The draft batch of P-EAGLE: its geometry (``geometry``) and the two kernels that build it.

Imports torch, NumPy and Triton only. Each kernel has a plain torch twin, which is its specification.
"""

from peagle_kernels.batch import DraftBuffers, DraftStep, KVGroups, TargetBatch, allocate_buffers
from peagle_kernels.broadcast import broadcast, broadcast_torch, broadcast_triton
from peagle_kernels.expand import expand, expand_torch
from peagle_kernels.expand_kernel import expand_triton
from peagle_kernels.layout import Layout

__all__ = [
    "DraftBuffers",
    "DraftStep",
    "KVGroups",
    "Layout",
    "TargetBatch",
    "allocate_buffers",
    "broadcast",
    "broadcast_torch",
    "broadcast_triton",
    "expand",
    "expand_torch",
    "expand_triton",
]
