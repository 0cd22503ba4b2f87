"""Both kernels compiled without a GPU, for sm_90 and sm_100.

The product's own launch code makes the call; a stand-in driver turns the launch into a compilation, so types,
specialisation and compile-time constants are those of a real launch and cannot drift from the kernel.
"""

import importlib
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.runtime.driver import driver

from peagle_kernels import gather_hidden_triton, prepare_inputs_triton
from tests.kernels.batches import Request, build

ARCHITECTURES = (90, 100)
# (KV groups, captured hidden states, dtype, dtype of idx_mapping)
EXPAND_SHAPES = [
    (1, 0, torch.bfloat16, torch.int32),
    (1, 3, torch.bfloat16, torch.int32),
    (1, 5, torch.float32, torch.int64),
    (2, 1, torch.bfloat16, torch.int64),
    (2, 3, torch.float32, torch.int32),
    (2, 5, torch.bfloat16, torch.int32),
    (0, 3, torch.bfloat16, torch.int64),  # while memory is profiled
]
WIDTH = 2880
# A real head's width, one that is a multiple of 8 only, and an odd one.
WIDTHS = {"real": WIDTH, "multiple of 8": 2056, "odd": 129}
DTYPES = (torch.bfloat16, torch.float32)

# LDG.E.128.CONSTANT, STG.E.EF.U16: a global access, its width in bits among the dotted words; 32 where none is named.
GLOBAL_ACCESS = re.compile(r"\b(LDG|STG)((?:\.[A-Z0-9_]+)*)\s")
ACCESS_WIDTH = re.compile(r"\.[US]?(8|16|64|128|256)(?![0-9])")


class AheadOfTime:
    """Stands for a kernel: ``kernel[grid](...)`` compiles and keeps the result."""

    def __init__(self, kernel: Any):
        self.kernel, self.compiled = kernel, []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.compiled.append(self.kernel.warmup(*args, grid=grid, **kwargs))

        return launch


class NoGPU:
    """What the compiler asks of a driver. The device number is the architecture, so each has its own cache."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


@dataclass(frozen=True)
class Assembled:
    """What the assembler made of a kernel.

    Attributes:
        registers: of each thread.
        shared_bytes: of each program.
        spill_bytes: stored to and loaded from local memory.
        loads, stores: global accesses in the machine code, counted by their width in bits.
    """

    registers: int
    shared_bytes: int
    spill_bytes: int
    loads: dict[str, int]
    stores: dict[str, int]


@contextmanager
def _compiling(arch: int, module: str, name: str) -> Iterator[AheadOfTime]:
    """Launches of this kernel are compilations for ``arch``, until the end of the block."""
    place = importlib.import_module(module)
    kernel, active = getattr(place, name), driver._active
    stand_in = AheadOfTime(kernel)
    driver._active = NoGPU(arch)
    setattr(place, name, stand_in)
    try:
        yield stand_in
    finally:
        driver._active = active
        setattr(place, name, kernel)


def prepare_inputs(
    arch: int, static: bool, num_groups: int, num_aux: int, dtype: torch.dtype, idx_dtype: torch.dtype, width: int
) -> Assembled:
    """``prepare_inputs_triton``'s kernel for ``num_aux`` captured hidden states of this width."""
    case = build(
        [Request(10, 4, 2, True, False), Request(5, 4, 0, True, False)],
        k=3,
        max_k=3,
        static=static,
        max_model_len=64,
        block_sizes=[16] * num_groups,
        widths=[width] * num_aux,
        seed=0,
    )
    out = case.poisoned_buffers()
    out = out._replace(staging=out.staging.to(dtype))
    target = case.target._replace(idx_mapping=case.target.idx_mapping.to(idx_dtype))
    with _compiling(arch, "peagle_kernels.prepare_inputs_kernel", "_prepare_inputs_kernel") as kernel:
        prepare_inputs_triton(target, tuple(h.to(dtype) for h in case.aux), case.groups, case.layout, case.step, out)
    (compiled,) = kernel.compiled
    return assemble(compiled, arch)


def gather_hidden(arch: int, dtype: torch.dtype, width: int) -> Assembled:
    """``gather_hidden_triton``'s kernel for rows of this width."""
    rows = torch.empty(4, width, dtype=dtype)
    with _compiling(arch, "peagle_kernels.gather_hidden", "_gather_hidden_kernel") as kernel:
        gather_hidden_triton(rows, rows.clone(), torch.empty(width, dtype=dtype), torch.zeros(4, dtype=torch.int32))
    (compiled,) = kernel.compiled
    return assemble(compiled, arch)


def assemble(compiled: Any, arch: int) -> Assembled:
    """Run the assembler again, for its report, and read the machine code that Triton keeps."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(compiled.asm["ptx"])
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={sm_arch_from_capability(arch)}", source, "-o", os.devnull]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.findall(r"Used (\d+) registers", report)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    assert (len(registers), len(spills)) == (1, 2), report
    loads, stores = access_widths(compiled.asm["sass"])
    return Assembled(int(registers[0]), compiled.metadata.shared, sum(map(int, spills)), loads, stores)


def access_widths(sass: str) -> tuple[dict[str, int], dict[str, int]]:
    """Global loads and global stores in this machine code: how many of each width in bits, the widest first."""
    seen: dict[str, Counter[int]] = {"LDG": Counter(), "STG": Counter()}
    for kind, words in GLOBAL_ACCESS.findall(sass):
        width = ACCESS_WIDTH.search(words)
        seen[kind][int(width[1]) if width else 32] += 1
    loads, stores = ({str(bits): n for bits, n in sorted(c.items(), reverse=True)} for c in seen.values())
    return loads, stores
