"""``prepare_inputs`` as one Triton launch.

Its programs are of three kinds (``prepare_inputs_parts``): blocks of draft rows, blocks of requests, and the
aux rows that staging gathers. ``prepare_inputs_torch`` says what each of them computes.
"""

import math

import torch
import triton
import triton.language as tl

from peagle_kernels.batch import DraftBuffers, KVGroups, TargetBatch
from peagle_kernels.geometry import MASK_ROW, PAD_ROW, PAD_SLOT
from peagle_kernels.layout import DraftBatch
from peagle_kernels.prepare_inputs_parts import fill_requests, fill_rows, stage

ROWS_PER_PROGRAM = 128
REQS_PER_PROGRAM = 32
COLUMNS_PER_STEP = 1024


def prepare_inputs_triton(
    target: TargetBatch,
    aux: tuple[torch.Tensor, ...],
    groups: KVGroups,
    batch: DraftBatch,
    out: DraftBuffers,
    *,
    max_model_len: int,
    parallel_drafting_token_id: int,
) -> None:
    """One launch of ``_prepare_inputs_kernel``; same meaning as ``prepare_inputs_torch``."""
    row_programs = -(-batch.num_rows // ROWS_PER_PROGRAM)
    # One request more than there are: the last start of a static layout.
    req_programs = -(-(batch.num_reqs_padded + 1) // REQS_PER_PROGRAM)
    num_staging = batch.num_staging_rows if aux else 0
    aux_strides = tuple(hidden.stride(0) for hidden in aux)
    _prepare_inputs_kernel[(row_programs + req_programs + num_staging * len(aux),)](
        target,
        out,
        groups.block_tables,
        tuple(table.stride(0) for table in groups.block_tables),
        groups.block_sizes,
        aux,
        aux_strides,
        out.slot_mappings.stride(0),
        out.staging.stride(0),
        batch.num_reqs,
        batch.num_reqs_padded,
        batch.num_rows,
        row_programs,
        req_programs,
        batch.static_length,
        batch.staging_length,
        batch.num_speculative_tokens,
        batch.samples_per_req,
        max_model_len,
        parallel_drafting_token_id,
        max(batch.num_reqs_padded - 1, 0).bit_length(),
        IS_STATIC=batch.static_length > 0,
        NUM_GROUPS=len(groups.block_tables),
        AUX_WIDTHS=tuple(hidden.shape[1] for hidden in aux),
        MASK_ROW=MASK_ROW,
        PAD_ROW=PAD_ROW,
        PAD_SLOT=PAD_SLOT,
        ROWS=ROWS_PER_PROGRAM,
        REQS=REQS_PER_PROGRAM,
        COLUMNS=COLUMNS_PER_STEP,
        VECTOR=vector_elements(out.staging.stride(0), *aux_strides),
    )


def vector_elements(*strides: int) -> int:
    """Elements that a row is a multiple of, up to 8: one access of 128 bits in 16-bit types.

    Triton sees by itself only that a stride divides by 16, and copies any other row an element at a time.
    """
    return math.gcd(8, *strides)


# Nothing that changes from step to step may be specialised: a new variant would compile while requests wait.
@triton.jit(
    do_not_specialize=[
        "num_reqs",
        "num_reqs_padded",
        "num_rows",
        "row_programs",
        "req_programs",
        "static_length",
        "staging_length",
        "num_speculative_tokens",
        "samples_per_req",
        "max_model_len",
        "search_steps",
    ]
)
def _prepare_inputs_kernel(
    target,  # TargetBatch
    out,  # DraftBuffers
    block_tables,  # NUM_GROUPS x [num_reqs, max_blocks]
    block_table_strides,
    block_sizes,
    aux,  # len(AUX_WIDTHS) x [num_target_rows, width]
    aux_strides,
    slots_stride,
    staging_stride,
    num_reqs,
    num_reqs_padded,
    num_rows,
    row_programs,
    req_programs,
    static_length,
    staging_length,
    num_speculative_tokens,
    samples_per_req,
    max_model_len,
    parallel_drafting_token_id,
    search_steps,
    IS_STATIC: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    AUX_WIDTHS: tl.constexpr,
    MASK_ROW: tl.constexpr,
    PAD_ROW: tl.constexpr,
    PAD_SLOT: tl.constexpr,
    ROWS: tl.constexpr,
    REQS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid < row_programs:
        fill_rows(
            pid,
            target,
            out,
            block_tables,
            block_table_strides,
            block_sizes,
            slots_stride,
            num_reqs,
            num_reqs_padded,
            num_rows,
            static_length,
            staging_length,
            num_speculative_tokens,
            max_model_len,
            parallel_drafting_token_id,
            search_steps,
            IS_STATIC,
            NUM_GROUPS,
            MASK_ROW,
            PAD_ROW,
            PAD_SLOT,
            ROWS,
        )
    elif pid < row_programs + req_programs:
        fill_requests(
            pid - row_programs,
            target,
            out,
            num_reqs,
            num_reqs_padded,
            static_length,
            num_speculative_tokens,
            samples_per_req,
            max_model_len,
            IS_STATIC,
            REQS,
        )
    else:
        if len(AUX_WIDTHS) > 0:
            stage(
                pid - row_programs - req_programs,
                target,
                out,
                aux,
                aux_strides,
                staging_stride,
                num_reqs,
                staging_length,
                IS_STATIC,
                AUX_WIDTHS,
                COLUMNS,
                VECTOR,
            )


# Whether TRITON_INTERPRET=1 is set: kernels then accept CPU tensors.
INTERPRETED = not isinstance(_prepare_inputs_kernel, triton.runtime.JITFunction)
