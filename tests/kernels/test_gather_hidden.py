"""gather_hidden: kernel and twin against one line of Python a row."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle_kernels import dispatch, gather_hidden_torch, gather_hidden_triton
from peagle_kernels.geometry import MASK_ROW, PAD_ROW
from tests.kernels.batches import KERNEL_DEVICE
from tests.support.batches import moved


@pytest.mark.parametrize("fn", [gather_hidden_torch, gather_hidden_triton])
@settings(max_examples=40, deadline=None)
@given(
    row_map=st.lists(st.integers(PAD_ROW, 6), min_size=1, max_size=20),
    width=st.sampled_from([1, 7, 64, 2048, 2050]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_each_row_is_written_once_from_its_source(fn, row_map, width, dtype):
    hidden = torch.randn(7, width).to(dtype)
    mask_hidden = torch.randn(width).to(dtype)
    device = KERNEL_DEVICE if fn is gather_hidden_triton else "cpu"
    out = torch.full((len(row_map), width), float("nan"), dtype=dtype, device=device)
    fn(out, *moved((hidden, mask_hidden, torch.tensor(row_map, dtype=torch.int32)), device))
    out = out.cpu()
    for row, source in enumerate(row_map):
        expected = hidden[source] if source >= 0 else mask_hidden if source == MASK_ROW else torch.zeros(width)
        assert torch.equal(out[row], expected.to(dtype))


@pytest.mark.parametrize("name", ["gather_hidden", "prepare_inputs", "select_candidates"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_whatever_is_no_cpu_runs_the_kernel(name: str, device: str, monkeypatch: pytest.MonkeyPatch):
    """A meta tensor stands for XPU: neither a CPU's nor CUDA's."""
    module, ran = importlib.import_module(f"peagle_kernels.{name}"), []
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    for twin in ("torch", "triton"):
        monkeypatch.setattr(module, f"{name}_{twin}", lambda *_, twin=twin, **__: ran.append(twin))
    out = torch.empty(1, device=device)
    if name == "gather_hidden":
        module.gather_hidden(out, out, out, out)
    elif name == "select_candidates":
        module.select_candidates(out, None, None, None, out)
    else:
        step = {"max_model_len": 8, "parallel_drafting_token_id": 1}
        module.prepare_inputs(None, (), None, None, SimpleNamespace(input_ids=out), **step)
    assert ran == ["torch" if device == "cpu" else "triton"]
