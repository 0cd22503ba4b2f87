"""Triton's own launcher, built and run without a GPU: every argument of every kernel reaches cuLaunchKernelEx.

Neither the interpreter nor a compilation uses the launcher, which takes tuples apart and drops what was compiled in.
"""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime.driver import driver

from peagle_kernels.gather_hidden import gather_hidden_triton
from peagle_kernels.lookup_drafts import OneHot, lookup_drafts_triton
from peagle_kernels.prepare_inputs import prepare_inputs_triton
from peagle_kernels.select_candidates import Drawing, select_candidates_triton
from tests.kernels import compiled
from tests.kernels import test_select_candidates as cases
from tests.support.batches import MASK_TOKEN, Request, build

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU every kernel test launches for real")
STUB = Path(__file__).with_name("libcuda_stub.c")
PTX_PARAMETER = re.compile(r"\.param \.(\w+)[^,]*_param_\d+,?\n")
C_TYPES = {"u64": ctypes.c_uint64, "u32": ctypes.c_int32}  # PTX calls each integer unsigned
Launched = tuple[tuple[int, ...], list[int]]  # the grid, and the arguments as the machine code reads them


class Kernel(compiled.AheadOfTime):
    """In place of a kernel: ``kernel[grid](...)`` compiles it, and launches it as Triton does."""

    launching: Any  # compiled, of whichever kernel is launched now

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            super(Kernel, self).__getitem__(grid)(*args, **kwargs)
            Kernel.launching = self.compiled[-1]
            self.kernel[grid](*args, **kwargs)

        return launch


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Launched]]]:
    """``launched(function, ...)``: what reaches the driver where ``function(...)`` launches its kernels, in order."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "no C compiler (CC, gcc or clang): Triton builds its launcher with one, here as on a GPU"
    folder = tmp_path_factory.mktemp("libcuda")
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", STUB, "-o", library], check=True)
    stub = ctypes.CDLL(str(library))  # whoever opens libcuda.so.1 from now on gets this one
    seen: list[Launched] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint32), *(ctypes.c_void_p,) * 3)
    def on_launch(config: Any, function: int, params: int, extra: int) -> int:
        types = [C_TYPES[name] for name in PTX_PARAMETER.findall(Kernel.launching.asm["ptx"])]
        places = (ctypes.c_void_p * len(types)).from_address(params)
        values = [c_type.from_address(place).value for c_type, place in zip(types, places, strict=True)]
        seen.append((tuple(config[:3]), values))
        return 0

    ctypes.c_void_p.in_dll(stub, "on_launch").value = ctypes.cast(on_launch, ctypes.c_void_p).value
    active = compiled.no_gpu(compiled.ARCHITECTURES[0])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_LIBCUDA_PATH", str(folder))
        active.utils = SimpleNamespace(**vars(CudaUtils()))
    active.launcher_cls = CudaLauncher
    active.utils.load_binary = lambda *_: (1, 1, 0, 0, 1024)  # module, function, registers, spills, most threads
    active.utils.get_device_properties = lambda device: {"max_shared_mem": 1 << 17}

    def launched(function: Callable[..., None], *args: Any, **kwargs: Any) -> list[Launched]:
        with patch.object(driver, "_active", active), compiled.in_place_of_kernels(function, Kernel):
            function(*args, **kwargs)
        launches = [(grid, arguments[:-2]) for grid, arguments in seen]
        assert all(arguments[-2:] == [0, 0] for _, arguments in seen)  # scratch memory, which no kernel here takes
        seen.clear()
        return launches

    yield launched


def addresses(tensors: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors if tensor is not None]


@pytest.mark.parametrize("static", [True, False], ids=["static", "ragged"])
@pytest.mark.parametrize("num_groups", [0, 1, 2])
def test_prepare_inputs(launched: Callable[..., list[Launched]], num_groups: int, static: bool):
    """One request, so that many of a step's numbers are 1, which Triton compiles in unless it is told not to."""
    case = build(
        [Request(10, 4, 2)], k=3, max_k=3, static=static, max_model_len=64, block_sizes=[16, 32][:num_groups],
        widths=[8, 24], dtype=torch.bfloat16,
    )  # fmt: skip
    out, tables = case.buffers(extra=5), case.groups.block_tables
    args = (case.target, case.aux, case.groups, case.batch, out)
    ((grid, arguments),) = launched(prepare_inputs_triton, *args, **case.constants)
    rows = case.batch.num_rows
    assert grid == (2 + 4 * 2, 1, 1)  # a block of rows, one of requests, and four staging rows of two aux rows
    assert arguments == [
        *addresses(case.target), *addresses(out), *addresses(tables), *case.groups.block_sizes,
        *(table.stride(0) for table in tables), *addresses(case.aux), 8, 24,
        1, 1, rows, *((6, 4) if static else (0, 0)), 3, 64, MASK_TOKEN, 0, out.slot_mappings.stride(0), 32,
    ]  # fmt: skip


def test_gather_hidden(launched: Callable[..., list[Launched]]):
    out, hidden = torch.empty(3, 2056), torch.empty(4, 2064)[:, :2056]
    mask_hidden, row_map = torch.empty(2056), torch.zeros(3, dtype=torch.int32)
    ((grid, arguments),) = launched(gather_hidden_triton, out, hidden, mask_hidden, row_map)
    assert grid == (3, 2, 1)
    assert arguments == [out.data_ptr(), 2056, hidden.data_ptr(), 2064, mask_hidden.data_ptr(), row_map.data_ptr()]


@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
def test_select_candidates(launched: Callable[..., list[Launched]], drawn: bool):
    """Greedily without gates and offsets, which are None then; drawn with both."""
    candidates, selector, offsets = cases.case(3, 2, 5, 16, 4, gated=drawn, reduced=drawn)
    out, scores = cases.strided(2, 3), torch.empty_like(candidates.logits)
    numbers = torch.zeros(6, dtype=torch.int64)
    drawing = Drawing(cases.draw_by_its_arguments, numbers, numbers + 1, *cases.state(5, 4, 5, 97), use_fp64=False)
    ((grid, arguments),) = launched(
        select_candidates_triton, out, candidates, selector, offsets, scores, drawing if drawn else None
    )
    assert grid == (2, 1, 1)
    tables = (selector.predecessor_codebook, selector.successor_codebook, selector.edge_scale, selector.unary_scale)
    assert arguments == [
        out.data_ptr(), 5, *addresses(candidates), *addresses(tables), *addresses((offsets, scores)),
        *(addresses(drawing[1:9]) if drawn else ()), *((4 * 97, 97, 4 * 5) if drawn else (0, 0, 0)), 3, 3,
    ]  # fmt: skip


@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
def test_lookup_drafts(launched: Callable[..., list[Launched]], drawn: bool):
    drafts, token_ids = cases.strided(2, 3), torch.zeros(4, 5000, dtype=torch.int32)
    rows, last = torch.zeros(2, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)[::3]
    one_hot = OneHot(torch.zeros(4, 3, 97), rows, -1.0, 2.0, torch.zeros(4, 3, 5, dtype=torch.int64))
    args = drafts, token_ids, rows, last, 2, 97, one_hot if drawn else None
    (grid, (matches, *request)), (last_grid, arguments) = launched(lookup_drafts_triton, *args)
    assert request == [token_ids.data_ptr(), 5000, rows.data_ptr(), 1, last.data_ptr(), 3]
    assert (grid, last_grid) == ((2, 8, 1), (2, 3, 1))
    q = [one_hot.q.data_ptr(), rows.data_ptr(), 1, one_hot.cached_ids.data_ptr(), 3 * 97, 97, 15] if drawn else [0] * 4
    assert arguments == [
        drafts.data_ptr(), 5, *request, matches, 2, 97, *q,
    ]  # fmt: skip
