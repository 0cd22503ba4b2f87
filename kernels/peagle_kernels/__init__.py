"""The draft batch of P-EAGLE: its geometry (``geometry``), two kernels that build it, and two for its tokens.

Imports torch, NumPy and Triton only. Each kernel has a plain torch twin, which is its specification.
"""
