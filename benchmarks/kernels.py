"""Each kernel against stock vLLM's functions and a device copy: ``python -m benchmarks.kernels [--out FILE]``.

Arms: ``prepare_inputs`` and ``gather_hidden`` alone, both in a row, stock V1's op sequence for the same step (the
runner's ``torch.cat`` of the captured states, then ``set_inputs_first_pass`` with its Triton kernel: vLLM's own
function, called on a stand-in for its proposer), and a plain device copy of the bytes that each kernel must move.
``fc``, which stands between the two kernels, belongs to no arm. Without a GPU: tiny shapes, the CPU twins, the wall
clock.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import arms
from benchmarks.arms import HAS_GPU
from benchmarks.launches import as_text, profiled
from benchmarks.shapes import NUM_AUX
from benchmarks.timing import Timer, copy_bandwidth
from peagle_kernels import gather_hidden, prepare_inputs
from peagle_tools.shared.provenance import provenance
from tests.support.batches import MASK_TOKEN, Case, Request, build, moved

DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
BLOCK_SIZE = 16
WIDTHS, REQUESTS, DEPTHS = (2880, 2048, 4096), (1, 4, 16, 64, 256), (3, 5, 7, 10)
PREFILL_REQUESTS, PREFILL_ROWS, PREFILL_K = 4, 8192, 7
KERNELS = ("prepare_inputs", "gather_hidden", "both")
COPY_SHARE_AIM = 0.8  # of the copy bandwidth, both kernels in a row, prefill


@dataclass(frozen=True)
class Shape:
    """A batch.

    Attributes:
        kind: "decode" (each request verifies K + 1 rows, some refused) or "prefill" (one chunk a request).
        reqs: requests.
        query: target rows of each.
        k: draft tokens a step.
        width: of a hidden state; NUM_AUX of them are captured.
    """

    kind: str
    reqs: int
    query: int
    k: int
    width: int

    @property
    def rows(self) -> int:
        return self.reqs * self.query

    def case(self, dtype: torch.dtype) -> Case:
        """The batch; in decode batches all counts of refused tokens occur in turn."""
        decode = self.kind == "decode"
        requests = [
            Request(i % 7 + 200 * decode, self.query, i % (self.k + 1) if decode else 0) for i in range(self.reqs)
        ]
        return build(
            requests,
            k=self.k,
            max_k=self.k,
            static=decode,
            max_model_len=4096 if self.query <= 1024 else 16384,
            block_sizes=[BLOCK_SIZE],
            widths=[self.width] * NUM_AUX,
            dtype=dtype,
        )


def shapes(tiny: bool, widths: Sequence[int] = WIDTHS) -> Iterator[Shape]:
    """Every batch, decode first."""
    if tiny:
        yield Shape("decode", 2, 4, 3, 64)
        yield Shape("prefill", 2, 32, 3, 64)
        return
    for width in widths:
        for k in DEPTHS:
            for reqs in REQUESTS:
                yield Shape("decode", reqs, k + 1, k, width)
        yield Shape("prefill", PREFILL_REQUESTS, PREFILL_ROWS // PREFILL_REQUESTS, PREFILL_K, width)


def moved_bytes(case: Case) -> dict[str, int]:
    """What each kernel must read and write, once: by KERNELS.

    prepare_inputs reads the valid target rows' captured states, ids and positions and a block-table entry a draft row;
    it writes staging, and of each draft row id, position, map entry and slot. gather_hidden reads each valid row after
    fc, ``mask_hidden`` and the row map, and writes every draft row.
    """
    rows, samples = case.batch.num_target_rows, case.batch.num_reqs * case.batch.num_speculative_tokens
    valid = rows - sum(request.rejected for request in case.requests)
    draft_rows, staged = case.batch.num_rows, case.batch.num_staging_rows
    row = case.aux[0][0].nbytes
    indices = valid * (4 + 8) + draft_rows * (4 + 4 + 8 + 4 + 8) + samples * 3 * 8
    prepare_bytes = (valid + staged) * NUM_AUX * row + indices
    gather_bytes = (valid + 1 + draft_rows) * row + draft_rows * 4
    return dict(zip(KERNELS, (prepare_bytes, gather_bytes, prepare_bytes + gather_bytes), strict=True))


class Calls:
    """Both kernels and stock's functions on one batch of this device, with buffers that exist already."""

    def __init__(self, shape: Shape):
        case = shape.case(DTYPE)
        self.shape, self.case, self.out = shape, case, moved(case.buffers(), DEVICE)
        self.target, self.aux, self.groups = moved((case.target, case.aux, case.groups), DEVICE)
        self.target = self.target._replace(idx_mapping=self.target.idx_mapping.int())
        self.after_fc = self.hidden(case.batch.num_staging_rows)
        self.mask_hidden = self.hidden(1)[0]
        self.draft_hidden = self.hidden(case.batch.num_rows)
        self.proposer, self.arguments = self._stock()

    def hidden(self, rows: int) -> torch.Tensor:
        """[rows, width] hidden states; their values matter to no kernel."""
        return torch.randn(rows, self.shape.width, device=DEVICE, dtype=DTYPE)

    def prepare_inputs(self) -> None:
        prepare_inputs(self.target, self.aux, self.groups, self.case.batch, self.out, **self.case.constants)

    def gather_hidden(self) -> None:
        row_map = self.out.row_map[: self.case.batch.num_rows]
        gather_hidden(self.draft_hidden, self.after_fc, self.mask_hidden, row_map)

    def both(self) -> None:
        self.prepare_inputs()
        self.gather_hidden()

    def stock(self) -> Any:
        """Stock V1's op sequence; returns what its function returns."""
        torch.cat([h[: self.shape.rows] for h in self.aux], dim=-1)
        return set_inputs_first_pass()(self.proposer, **self.arguments)

    def _stock(self) -> tuple[SimpleNamespace, dict[str, Any]]:
        """The attributes of its proposer that ``set_inputs_first_pass`` reads, and its arguments.

        vLLM's ``SpecDecodeBaseProposer`` sets them in its constructor, which needs a whole configuration.
        """
        from vllm.v1.attention.backend import CommonAttentionMetadata

        shape, target = self.shape, self.target
        max_rows, max_model_len = shape.rows + shape.reqs * (shape.k - 1), self.case.max_model_len
        seq_lens = torch.tensor([r.p0 + r.n for r in self.case.requests], dtype=torch.int32)

        def zeros(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=DEVICE)

        proposer = SimpleNamespace(
            use_heterogeneous_vocab=False,
            needs_extra_input_slots=True,
            pass_hidden_states_to_model=True,
            extra_slots_per_request=shape.k,
            net_num_new_slots_per_request=shape.k - 1,
            parallel_drafting_token_id=MASK_TOKEN,
            parallel_drafting_hidden_state_tensor=self.mask_hidden,
            block_size=BLOCK_SIZE,
            max_model_len=max_model_len,
            device=torch.device(DEVICE),
            input_ids=zeros(max_rows, dtype=torch.int32),
            positions=zeros(max_rows, dtype=torch.int64),
            hidden_states=zeros(max_rows, shape.width, dtype=DTYPE),
            is_rejected_token_mask=zeros(max_rows, dtype=torch.bool),
            is_masked_token_mask=zeros(max_rows, dtype=torch.bool),
            arange=torch.arange(max(shape.reqs + 1, max_rows), dtype=torch.int32, device=DEVICE),
        )
        cad = CommonAttentionMetadata(
            query_start_loc=target.query_start_loc,
            query_start_loc_cpu=self.case.target.query_start_loc,
            seq_lens=seq_lens.to(DEVICE),
            num_reqs=shape.reqs,
            num_actual_tokens=shape.rows,
            max_query_len=shape.query,
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=self.groups.block_tables[0].contiguous(),
            slot_mapping=zeros(shape.rows, dtype=torch.int64),
        )
        arguments = {
            "target_token_ids": target.input_ids,
            "next_token_ids": target.last_sampled[target.idx_mapping.long()].int(),
            "target_positions": target.positions,
            "target_hidden_states": self.hidden(shape.rows),
            "token_indices_to_sample": None,
            "cad": cad,
            "num_rejected_tokens_gpu": target.num_rejected if shape.kind == "decode" else None,
        }
        return proposer, arguments

    def check(self) -> None:
        """Both sides build the same drafts' inputs, or the comparison is void. Checked by the rows that are sampled."""
        self.prepare_inputs()
        _, theirs, _ = self.stock()
        ours = self.out.sample_indices[: self.shape.reqs * self.shape.k]
        for name in ("input_ids", "positions"):
            if not torch.equal(getattr(self.out, name)[ours], getattr(self.proposer, name)[theirs.long()]):
                raise SystemExit(f"benchmarks.kernels: {name} of the sampled rows differ from stock's at {self.shape}")


@functools.cache
def set_inputs_first_pass() -> Callable[..., Any]:
    """Stock V1's function, before it is bound to a proposer."""
    if not HAS_GPU:
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        current_platform.register_triton_kernel_overrides()  # the CPU worker's stand-ins for the Triton kernels
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    return SpecDecodeBaseProposer.set_inputs_first_pass


def copy_of(num_bytes: int) -> Callable[[], Any]:
    """A device copy that reads and writes so many bytes together."""
    source = torch.ones(num_bytes // 2, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


@torch.inference_mode()
def measure(shape: Shape, timer: Timer, bandwidth: float, repeats: int) -> dict[str, Any]:
    """One entry of the result: every arm of this shape."""
    calls = Calls(shape)
    num_bytes = moved_bytes(calls.case)
    calls.check()  # and gather_hidden alone needs a row map
    by_arm = {name: getattr(calls, name) for name in KERNELS}
    by_arm |= {f"copy of {name}": copy_of(num_bytes[name]) for name in KERNELS} | {"stock": calls.stock}
    cell: dict[str, Any] = {**vars(shape), "rows": shape.rows, "arms": {}}
    for name, call in by_arm.items():
        times = timer.measure(call, repeats)
        arm = {"device_us": arms.summary(times.device), "host_us": arms.summary(times.host)}
        if name in num_bytes:
            achieved = num_bytes[name] / (arm["device_us"]["median"] * 1e-6)
            arm |= {"bytes": num_bytes[name], "bytes_per_second": achieved, "of_copy_bandwidth": achieved / bandwidth}
        arm["launches"] = profiled(call)[1] if HAS_GPU else None
        cell["arms"][name] = arm
    median = {name: arm["device_us"]["median"] for name, arm in cell["arms"].items()}
    cell["stock_over_both"] = median["stock"] / median["both"]
    cell["copy_over"] = {name: median[f"copy of {name}"] / median[name] for name in KERNELS}
    return cell


COLUMNS = ("batch", "arm", "device us (p10-p90)", "host us", "launches", "MB", "of copy", "copy / it", "stock / both")


def row(cell: dict[str, Any], name: str) -> tuple[object, ...]:
    """One arm of a cell, for the table."""
    arm, device = cell["arms"][name], cell["arms"][name]["device_us"]
    of_copy = ("", "", "")
    if "bytes" in arm:
        of_copy = (f"{arm['bytes'] / 1e6:.2f}", f"{arm['of_copy_bandwidth']:.0%}", f"{cell['copy_over'][name]:.0%}")
    return (
        f"{cell['kind']} B={cell['reqs']} K={cell['k']} d={cell['width']}",
        name,
        f"{device['median']:.1f} ({device['p10']:.1f}-{device['p90']:.1f})",
        f"{arm['host_us']['median']:.1f}",
        as_text(arm["launches"]),
        *of_copy,
        f"{cell['stock_over_both']:.2f}x" if name == "stock" else "",
    )


def page(cells: list[dict[str, Any]]) -> str:
    """The table, and on a GPU the bandwidth that both kernels reach with a prefill beside its aim."""
    lines = [arms.measured_table(COLUMNS, [row(cell, name) for cell in cells for name in (*KERNELS, "stock")])]
    for cell in cells if HAS_GPU else []:
        share = cell["arms"]["both"]["of_copy_bandwidth"]
        if cell["kind"] == "prefill":
            met = arms.verdict(share >= COPY_SHARE_AIM)
            lines.append(f"prefill d={cell['width']}: {share:.0%} of copy bandwidth, aim {COPY_SHARE_AIM:.0%}: {met}")
    return "\n".join(lines)


def main() -> None:
    parser = arms.parser(__doc__)
    parser.add_argument("--tiny", action="store_true", default=not HAS_GPU, help="tiny shapes (always so on a CPU)")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="of a hidden state")
    parser.add_argument("--repeats", type=int, default=None, help="of each arm and shape (default: 50; tiny: 5)")
    args = parser.parse_args()
    repeats, timer = args.repeats or (5 if args.tiny else 50), Timer()
    bandwidth = copy_bandwidth(timer)
    cells: list[dict[str, Any]] = []
    report = provenance() | {
        "dtype": str(DTYPE),
        "num_aux": NUM_AUX,
        "tiny": args.tiny,
        "repeats": repeats,
        "copy_bytes_per_second": bandwidth,
        "empty_us": arms.summary(timer.measure(lambda: None, repeats).device),
        "cells": cells,
    }
    for shape in shapes(args.tiny, args.widths):
        cells.append(measure(shape, timer, bandwidth, repeats))
        arms.write_result(args.out, __doc__, report)
    print(page(cells))


if __name__ == "__main__":
    main()
