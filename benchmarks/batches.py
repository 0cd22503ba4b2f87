"""The target batches of the kernel benchmark, for the plugin's kernels and for stock vLLM's functions alike."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from peagle_kernels import DraftStep, KVGroups, Layout, TargetBatch, allocate_buffers, geometry

BLOCK_SIZE = 16
MASK_TOKEN = 7
NUM_AUX = 3


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

    @property
    def static(self) -> bool:
        return self.kind == "decode"

    @property
    def draft_length(self) -> int:
        """Draft rows a request; the plugin's layout."""
        return geometry.static_length(self.k, self.k) if self.static else self.query + self.k - 1

    @property
    def refused(self) -> list[int]:
        """Refused tokens of each request: all counts in turn."""
        return [i % (self.k + 1) for i in range(self.reqs)] if self.static else [0] * self.reqs

    @property
    def max_model_len(self) -> int:
        return 4096 if self.query <= 1024 else 16384


class Batch:
    """One batch of this shape on a device."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype):
        self.shape = shape
        reqs, rows, device_ = shape.reqs, shape.rows, torch.device(device)
        gen = torch.Generator().manual_seed(0)

        def ints(*size: int, dtype: torch.dtype = torch.int32, low: int = 1, high: int = 500) -> torch.Tensor:
            return torch.randint(low, high, size, generator=gen).to(device_, dtype)

        p0 = torch.arange(reqs) % 7 + (200 if shape.static else 0)
        self.starts = torch.arange(reqs + 1, dtype=torch.int32) * shape.query
        blocks = shape.max_model_len // BLOCK_SIZE
        self.table = (torch.randperm(reqs * blocks, generator=gen) + 1).int().view(reqs, blocks).to(device_)
        self.positions = (p0[:, None] + torch.arange(shape.query)).flatten().to(device_)
        self.seq_lens = (p0 + shape.query).int()
        self.ids = ints(rows)
        self.rejected = torch.tensor(shape.refused, dtype=torch.int32, device=device_)
        self.next_tokens = ints(reqs)
        self.device, self.dtype = device_, dtype
        self.aux = [self.hidden(rows) for _ in range(NUM_AUX)]
        self.after_fc = self.hidden(self.staging_rows)
        self.mask_hidden = self.hidden(1)[0]

    def hidden(self, rows: int) -> torch.Tensor:
        """[rows, width] hidden states; what is in them matters to no kernel."""
        return torch.randn(rows, self.shape.width, device=self.device, dtype=self.dtype)

    @property
    def staging_rows(self) -> int:
        """Rows that fc reads: a decode batch's are compact."""
        return self.shape.reqs * (self.shape.k + 1) if self.shape.static else self.shape.rows

    def plugin(self) -> SimpleNamespace:
        """What the kernels take: target, aux, groups, layout, step, buffers and the output."""
        shape, length = self.shape, self.shape.draft_length
        num_draft = shape.reqs * length
        layout = (
            Layout(num_draft, shape.reqs, static_length=length, staging_length=shape.k + 1)
            if shape.static
            else Layout(num_draft, shape.reqs)
        )
        staging = torch.zeros(self.staging_rows, NUM_AUX * shape.width, dtype=self.dtype, device=self.device)
        buffers = allocate_buffers(
            max_rows=num_draft, max_num_reqs=shape.reqs, max_speculative_tokens=shape.k, staging=staging
        )
        buffers.query_start_loc[: shape.reqs + 1] = torch.arange(shape.reqs + 1) * length
        target = TargetBatch(
            input_ids=self.ids,
            positions=self.positions,
            query_start_loc=self.starts.to(self.device),
            num_rejected=self.rejected,
            num_sampled=torch.ones(shape.reqs, dtype=torch.int32, device=self.device),
            idx_mapping=torch.arange(shape.reqs, dtype=torch.int32, device=self.device),
            last_sampled=self.next_tokens,
            next_prefill_tokens=self.next_tokens,
            temperature=buffers.temperature,
            seeds=buffers.seeds,
        )
        return SimpleNamespace(
            target=target,
            aux=tuple(self.aux),
            groups=KVGroups((self.table,), (BLOCK_SIZE,)),
            layout=layout,
            step=DraftStep(shape.reqs, shape.rows, shape.k, shape.max_model_len, MASK_TOKEN),
            buffers=buffers,
            hidden=self.after_fc,
            mask_hidden=self.mask_hidden,
            out=torch.empty(num_draft, shape.width, dtype=self.dtype, device=self.device),
        )

    def stock(self) -> tuple[SimpleNamespace, dict[str, Any]]:
        """What stock V1's ``set_inputs_first_pass`` reads of its proposer, and its arguments.

        The proposer's are the attributes that vLLM's ``SpecDecodeBaseProposer`` sets in its constructor, which would
        want a whole configuration.
        """
        from vllm.v1.attention.backend import CommonAttentionMetadata

        shape, device = self.shape, self.device
        max_rows = shape.rows + shape.reqs * (shape.k - 1)
        proposer = SimpleNamespace(
            use_heterogeneous_vocab=False,
            needs_extra_input_slots=True,
            pass_hidden_states_to_model=True,
            extra_slots_per_request=shape.k,
            net_num_new_slots_per_request=shape.k - 1,
            parallel_drafting_token_id=MASK_TOKEN,
            parallel_drafting_hidden_state_tensor=self.mask_hidden,
            block_size=BLOCK_SIZE,
            max_model_len=shape.max_model_len,
            device=device,
            input_ids=torch.zeros(max_rows, dtype=torch.int32, device=device),
            positions=torch.zeros(max_rows, dtype=torch.int64, device=device),
            hidden_states=torch.zeros(max_rows, shape.width, dtype=self.dtype, device=device),
            is_rejected_token_mask=torch.zeros(max_rows, dtype=torch.bool, device=device),
            is_masked_token_mask=torch.zeros(max_rows, dtype=torch.bool, device=device),
            arange=torch.arange(max(shape.reqs + 1, max_rows), dtype=torch.int32, device=device),
        )
        cad = CommonAttentionMetadata(
            query_start_loc=self.starts.to(device),
            query_start_loc_cpu=self.starts,
            seq_lens=self.seq_lens.to(device),
            num_reqs=shape.reqs,
            num_actual_tokens=shape.rows,
            max_query_len=shape.query,
            max_seq_len=int(self.seq_lens.max()),
            block_table_tensor=self.table,
            slot_mapping=torch.zeros(shape.rows, dtype=torch.int64, device=device),
        )
        arguments = {
            "target_token_ids": self.ids,
            "next_token_ids": self.next_tokens,
            "target_positions": self.positions,
            "target_hidden_states": self.hidden(shape.rows),
            "token_indices_to_sample": None,
            "cad": cad,
            "num_rejected_tokens_gpu": self.rejected if shape.static else None,
        }
        return proposer, arguments


def moved_bytes(shape: Shape, element_bytes: int) -> dict[str, int]:
    """What each kernel must read and write, once: {"prepare_inputs", "gather_hidden", "both"}.

    prepare_inputs reads the valid target rows' captured states, ids and positions and a block-table entry a draft row;
    it writes staging, and of each draft row id, position, map entry and slot. gather_hidden reads each valid row after
    fc, ``mask_hidden`` and the row map, and writes every draft row.
    """
    valid = shape.rows - sum(shape.refused)
    draft_rows = shape.reqs * shape.draft_length
    staged = shape.reqs * (shape.k + 1) if shape.static else shape.rows
    row = shape.width * element_bytes
    indices = valid * (4 + 8) + draft_rows * (4 + 4 + 8 + 4 + 8) + shape.reqs * shape.k * 3 * 8
    prepare_inputs = (valid + staged) * NUM_AUX * row + indices
    gather_hidden = (valid + 1 + draft_rows) * row + draft_rows * 4
    return {"prepare_inputs": prepare_inputs, "gather_hidden": gather_hidden, "both": prepare_inputs + gather_hidden}
