"""What runs a kernel here: its Triton program, or its torch twin; and what kernels share."""

import math

import torch
import triton

INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: kernels accept CPU tensors


def runs_twin(tensor: torch.Tensor) -> bool:
    """Whether the torch twin works on this tensor: on a CPU without Triton's interpreter."""
    return tensor.is_cpu and not INTERPRETED


def vector_elements(*strides: int) -> int:
    """Elements that a row is a multiple of, up to 8: one access of 128 bits in 16-bit types.

    Triton sees by itself only that a stride divides by 16, and copies any other row an element at a time.
    """
    return math.gcd(8, *strides)
