"""prepare_inputs: its torch twin against a per-request simulation, its kernel against the twin."""

import torch
from hypothesis import example, given, settings

from peagle_kernels.geometry import MASK_ROW, PAD_ROW, PAD_SLOT
from peagle_kernels.prepare_inputs import prepare_inputs, prepare_inputs_torch
from tests.support.batches import KERNEL_DEVICE, MASK_TOKEN, POISON, Case, Request, build, cases, moved


def run(fn, case: Case):
    """The buffers that ``fn`` filled where it runs, on the CPU."""
    device = KERNEL_DEVICE if fn is prepare_inputs else "cpu"
    out = moved(case.buffers(extra=5, fill=POISON), device)
    fn(*moved((case.target, case.aux, case.groups), device), case.batch, out, **case.constants)
    return moved(out, "cpu")


@settings(max_examples=150, deadline=None)
@given(cases())
def test_twin_equals_a_loop_over_requests(case: Case):
    """The twin against the description of the draft batch: loops over requests and positions, no shared code."""
    out, k = run(prepare_inputs_torch, case), case.batch.num_speculative_tokens
    drafted, captured = max(k, 1), torch.cat(case.aux, dim=-1) if case.aux else None
    samples = torch.stack((out.sample_indices, out.sample_pos, out.sample_idx_mapping), dim=1)
    row0 = first = 0
    for b, (req, length) in enumerate(zip(case.requests, case.draft_lengths, strict=False)):
        p_last = req.p0 + req.n - 1 - req.rejected
        seq_len = max(length, min(p_last + drafted, case.max_model_len))
        assert out.seq_lens[b] == seq_len
        state = int(case.target.idx_mapping[b])
        next_tokens = case.target.last_sampled if req.samples else case.target.next_prefill_tokens
        row_of = {}
        for r in range(length):
            position, row = seq_len - length + r, row0 + r
            row_of[position] = row
            token, source = 0, PAD_ROW
            if req.p0 <= position <= p_last:
                j = position - req.p0
                source = j + (b * case.batch.staging_length if case.batch.static_length else first)
                token = case.target.input_ids[first + j + 1] if position < p_last else next_tokens[max(state, 0)]
            elif p_last < position < p_last + drafted:
                token, source = MASK_TOKEN, MASK_ROW
            assert (out.input_ids[row], out.row_map[row], out.positions[row]) == (token, source, position)
            if source >= 0 and captured is not None:
                assert torch.equal(out.staging[source], captured[first + position - req.p0])
            for g, (table, size) in enumerate(zip(case.groups.block_tables, case.groups.block_sizes, strict=True)):
                slot = PAD_SLOT
                if source != PAD_ROW and position < case.max_model_len and state >= 0:
                    block = int(table[b, position // size])
                    slot = block * size + position % size if block else PAD_SLOT
                assert out.slot_mappings[g, row] == slot
        room = length - case.batch.staging_length + 1 if case.batch.static_length else k
        for i in range(room):
            sample = [row_of[min(p_last + i, seq_len - 1)], p_last + 1 + i, state] if i < k else [0, 0, -1]
            assert samples[b * room + i].tolist() == sample
        assert (out.query_start_loc[b], out.query_start_loc[b + 1]) == (row0, row0 + length)
        if state >= 0:
            for name in ("temperature", "seeds", "top_k", "top_p"):
                assert getattr(out, name)[state] == getattr(case.target, name)[state]
        row0, first = row0 + length, first + req.n
    for b in range(len(case.requests), case.batch.num_reqs_padded):
        assert (out.seq_lens[b], out.query_start_loc[b + 1]) == (0, row0)


def large(static: bool) -> Case:
    """More requests than one program fills, and hidden states wider than it copies at once."""
    requests = [Request(i, 1 + i % 3, 0) for i in range(40)]
    sizes = {"max_model_len": 45, "block_sizes": [4], "widths": [1032]}
    return build(requests, k=2, max_k=2, static=static, **sizes)


@settings(max_examples=60, deadline=None)
@given(cases())
@example(large(static=True))
@example(large(static=False))
def test_kernel_equals_twin_and_writes_every_element(case: Case):
    twin, kernel = run(prepare_inputs_torch, case), run(prepare_inputs, case)
    torch.testing.assert_close(kernel, twin, rtol=0, atol=0)  # to the bit, what is poisoned included
    batch, num_samples = case.batch, case.batch.num_reqs_padded * case.batch.samples_per_req
    written = dict.fromkeys(("input_ids", "positions", "row_map", "slot_mappings"), batch.num_rows)
    written["seq_lens"] = batch.num_reqs_padded
    written |= dict.fromkeys(("sample_indices", "sample_pos", "sample_idx_mapping"), num_samples)
    for name, count in written.items():
        is_poison = getattr(kernel, name) == POISON
        assert not is_poison[..., :count].any(), f"{name}: an element was not written"
        assert is_poison[..., count:].all(), f"{name}: written past its end"
