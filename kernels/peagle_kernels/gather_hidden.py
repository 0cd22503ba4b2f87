"""gather_hidden: the drafter's hidden states, each row written once.

out[r] = hidden[row_map[r]]   where row_map[r] >= 0
         mask_hidden          where row_map[r] == MASK_ROW
         0                    where row_map[r] == PAD_ROW
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle_kernels.dispatch import runs_twin, vector_elements
from peagle_kernels.geometry import MASK_ROW, PAD_ROW

COLUMNS_PER_PROGRAM = 2048


def gather_hidden(out: Tensor, hidden: Tensor, mask_hidden: Tensor, row_map: Tensor) -> None:
    """Assemble the drafter's input rows.

    Args:
        out: [num_rows, width], every element is written.
        hidden: [num_staging_rows, width] captured hidden states after the head's ``fc``.
        mask_hidden: [width] the learned ``mask_hidden`` after ``fc``.
        row_map: [num_rows] int32, as ``prepare_inputs`` fills it.
    """
    if runs_twin(out):
        return gather_hidden_torch(out, hidden, mask_hidden, row_map)
    num_rows, width = out.shape
    _gather_hidden_kernel[(num_rows, triton.cdiv(width, COLUMNS_PER_PROGRAM))](
        out,
        out.stride(0),
        hidden,
        hidden.stride(0),
        mask_hidden,
        row_map,
        WIDTH=width,
        MASK_ROW=MASK_ROW,
        COLUMNS=COLUMNS_PER_PROGRAM,
        VECTOR=vector_elements(out.stride(0), hidden.stride(0)),
    )


def gather_hidden_torch(out: Tensor, hidden: Tensor, mask_hidden: Tensor, row_map: Tensor) -> None:
    """The meaning of ``gather_hidden`` in plain torch, and what a CPU runs."""
    torch.index_select(hidden, 0, row_map.clamp(min=0), out=out)
    out[row_map == MASK_ROW] = mask_hidden
    out[row_map == PAD_ROW] = 0


@triton.jit
def _gather_hidden_kernel(
    out_ptr,  # [num_rows, width]
    out_stride,
    hidden_ptr,  # [num_staging_rows, width]
    hidden_stride,
    mask_hidden_ptr,  # [width]
    row_map_ptr,  # [num_rows]
    WIDTH: tl.constexpr,
    MASK_ROW: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_range = column < WIDTH
    source = tl.load(row_map_ptr + row).to(tl.int64)
    hidden_row = hidden_ptr + tl.multiple_of(source * hidden_stride, VECTOR)
    captured = tl.load(hidden_row + column, mask=in_range & (source >= 0), other=0.0)
    learned = tl.load(mask_hidden_ptr + column, mask=in_range & (source == MASK_ROW), other=0.0)
    out_row = out_ptr + tl.multiple_of(row * out_stride, VECTOR)
    tl.store(out_row + column, tl.where(source >= 0, captured, learned), mask=in_range)
