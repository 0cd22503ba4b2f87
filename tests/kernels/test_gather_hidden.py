"""gather_hidden: kernel and twin against one line of Python a row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle_kernels import dispatch
from peagle_kernels.gather_hidden import gather_hidden, gather_hidden_torch
from peagle_kernels.geometry import MASK_ROW, PAD_ROW
from tests.support.batches import KERNEL_DEVICE, moved


@pytest.mark.parametrize("fn", [gather_hidden_torch, gather_hidden])
@settings(max_examples=40, deadline=None)
@given(
    row_map=st.lists(st.integers(PAD_ROW, 6), min_size=1, max_size=20),
    width=st.sampled_from([1, 7, 64, 2048, 2050]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_each_row_is_written_once_from_its_source(fn, row_map, width, dtype):
    hidden = torch.randn(7, width).to(dtype)
    mask_hidden = torch.randn(width).to(dtype)
    device = KERNEL_DEVICE if fn is gather_hidden else "cpu"
    out = torch.full((len(row_map), width), float("nan"), dtype=dtype, device=device)
    fn(out, *moved((hidden, mask_hidden, torch.tensor(row_map, dtype=torch.int32)), device))
    out = out.cpu()
    for row, source in enumerate(row_map):
        expected = hidden[source] if source >= 0 else mask_hidden if source == MASK_ROW else torch.zeros(width)
        assert torch.equal(out[row], expected.to(dtype))


def test_whatever_is_no_cpu_runs_the_kernel(monkeypatch: pytest.MonkeyPatch):
    """A meta tensor stands for XPU: neither a CPU's nor CUDA's. Under the interpreter a CPU does, too."""
    on_cpu, elsewhere = torch.empty(1), torch.empty(1, device="meta")
    for interpreted, twins in ((False, [True, False]), (True, [False, False])):
        monkeypatch.setattr(dispatch, "INTERPRETED", interpreted)
        assert [dispatch.runs_twin(tensor) for tensor in (on_cpu, elsewhere)] == twins
