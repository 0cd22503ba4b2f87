"""Both kernels compile for sm_90 and sm_100 without a GPU, and spill no registers.

The product's own launch code makes the call; a stand-in driver turns the launch into a compilation, so types,
specialisation and compile-time constants are those of a real launch and cannot drift from the kernel.
"""

import importlib
import os
import re
import subprocess
from dataclasses import replace

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.runtime.driver import driver

from peagle_kernels import broadcast_triton, expand_triton
from tests.kernels.batches import Request, build

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter never compiles: run without TRITON_INTERPRET"
)

# (KV groups, captured hidden states, dtype, dtype of idx_mapping)
SHAPES = [
    (1, 0, torch.bfloat16, torch.int32),
    (1, 3, torch.bfloat16, torch.int32),
    (1, 5, torch.float32, torch.int64),
    (2, 1, torch.bfloat16, torch.int64),
    (2, 3, torch.float32, torch.int32),
    (2, 5, torch.bfloat16, torch.int32),
    (0, 3, torch.bfloat16, torch.int64),  # while memory is profiled
]


class AheadOfTime:
    """Stands for a kernel: ``kernel[grid](...)`` compiles and keeps the result."""

    def __init__(self, kernel):
        self.kernel, self.compiled = kernel, []

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.compiled.append(self.kernel.warmup(*args, grid=grid, **kwargs))

        return launch


class NoGPU:
    """What the compiler asks of a driver. The device number is the architecture, so each has its own cache."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_device(self):
        return self.arch

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)


@pytest.fixture(params=[90, 100], ids=["sm_90", "sm_100"])
def arch(request, monkeypatch):
    monkeypatch.setattr(driver, "_active", NoGPU(request.param))
    return request.param


def compile_instead(monkeypatch, module: str, name: str) -> AheadOfTime:
    """Put ``AheadOfTime`` in the kernel's place, for this test."""
    place = importlib.import_module(module)
    kernel = AheadOfTime(getattr(place, name))
    monkeypatch.setattr(place, name, kernel)
    return kernel


def spilled_bytes(ptx: str, arch: int, tmp_path) -> int:
    """Bytes that the assembler reports as spilled, stores and loads."""
    source = tmp_path / "kernel.ptx"
    source.write_text(ptx)
    command = [get_ptxas(arch).path, "-v", f"--gpu-name={sm_arch_from_capability(arch)}", source, "-o", os.devnull]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    figures = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    assert len(figures) == 2, report
    return sum(map(int, figures))


@pytest.mark.parametrize("static", [True, False], ids=["static", "ragged"])
@pytest.mark.parametrize(("num_groups", "num_aux", "dtype", "idx_dtype"), SHAPES, ids=str)
def test_expand(arch, static, num_groups, num_aux, dtype, idx_dtype, monkeypatch, tmp_path):
    case = build(
        [Request(10, 4, 2, True, False), Request(5, 4, 0, True, False)],
        k=3,
        max_k=3,
        static=static,
        max_model_len=64,
        block_sizes=[16] * num_groups,
        widths=[2880] * num_aux,
        seed=0,
    )
    out = case.poisoned_buffers()
    out = replace(out, staging=out.staging.to(dtype))
    target = replace(case.target, idx_mapping=case.target.idx_mapping.to(idx_dtype))
    kernel = compile_instead(monkeypatch, "peagle_kernels.expand_kernel", "_expand_kernel")
    expand_triton(target, tuple(h.to(dtype) for h in case.aux), case.groups, case.layout, case.step, out)
    (compiled,) = kernel.compiled
    assert spilled_bytes(compiled.asm["ptx"], arch, tmp_path) == 0


@pytest.mark.parametrize("width", [2880, 129], ids=["aligned", "odd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_broadcast(arch, dtype, width, monkeypatch, tmp_path):
    kernel = compile_instead(monkeypatch, "peagle_kernels.broadcast", "_broadcast_kernel")
    rows = torch.empty(4, width, dtype=dtype)
    broadcast_triton(rows, rows.clone(), torch.empty(width, dtype=dtype), torch.zeros(4, dtype=torch.int32))
    (compiled,) = kernel.compiled
    assert spilled_bytes(compiled.asm["ptx"], arch, tmp_path) == 0
