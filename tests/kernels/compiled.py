"""Kernels of ``peagle_kernels``, compiled for GPUs that are not there, and what the assembler made of them.

The product's own launch code makes the call; a stand-in driver turns the launch into a compilation, so types,
specialisation and compile-time constants are those of a real launch and cannot drift from the kernel.
"""

import importlib
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.runtime.driver import driver

ARCHITECTURES = (90, 100)
# LDG.E.128.CONSTANT, STG.E.EF.U16: a global access, its width in bits among the dotted words; 32 where none is named.
GLOBAL_ACCESS = re.compile(r"\b(LDG|STG)((?:\.[A-Z0-9_]+)*)\s")
ACCESS_WIDTH = re.compile(r"\.[US]?(8|16|64|128|256)(?![0-9])")


class AheadOfTime:
    """In place of a kernel: ``kernel[grid](...)`` compiles and keeps the result."""

    def __init__(self, kernel: Any):
        self.kernel, self.compiled = kernel, []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.compiled.append(self.kernel.warmup(*args, grid=grid, **kwargs))

        return launch


def no_gpu(arch: int) -> Any:
    """What the compiler reads of a driver. The device number is the architecture, so each has its own cache."""
    return SimpleNamespace(
        get_current_device=lambda: arch,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
    )


@dataclass(frozen=True)
class Assembled:
    """What the assembler made of a kernel."""

    spill_bytes: int  # stored to and loaded from local memory
    loads: Counter[int]  # global accesses in the machine code, counted by their width in bits
    stores: Counter[int]  # the same


@contextmanager
def in_place_of_kernels(launch: Callable[..., None], stand_in: type["AheadOfTime"]) -> Iterator[list[Any]]:
    """Meanwhile every kernel in the module of ``launch`` is a ``stand_in``; yields them."""
    module = importlib.import_module(launch.__module__)
    names = [name for name in vars(module) if name.startswith("_") and name.endswith("_kernel")]
    kernels = {name: stand_in(getattr(module, name)) for name in names}
    with patch.multiple(module, **kernels):
        yield list(kernels.values())


def compile_for(arch: int, launch: Callable[..., None], *args: Any, **kwargs: Any) -> Assembled:
    """The kernels that ``launch(...)`` launches, compiled for ``arch`` instead; what was made of them, added up."""
    with patch.object(driver, "_active", no_gpu(arch)), in_place_of_kernels(launch, AheadOfTime) as kernels:
        launch(*args, **kwargs)
    compiled = [once.asm for kernel in kernels for once in kernel.compiled]
    widths: dict[str, Counter[int]] = {"LDG": Counter(), "STG": Counter()}
    for kind, words in GLOBAL_ACCESS.findall("".join(asm["sass"] for asm in compiled)):
        width = ACCESS_WIDTH.search(words)
        widths[kind][int(width[1]) if width else 32] += 1
    return Assembled(sum(spill_bytes(asm["ptx"], arch) for asm in compiled), widths["LDG"], widths["STG"])


def spill_bytes(ptx: str, arch: int) -> int:
    """Bytes spilled to local memory, stores and loads, as the assembler reports when it is run again."""
    command = [get_ptxas(arch).path, "-v", f"--gpu-name={sm_arch_from_capability(arch)}", "-", "-o", os.devnull]
    report = subprocess.run(command, input=ptx, check=True, capture_output=True, text=True).stderr
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    assert len(spills) == 2, report
    return sum(map(int, spills))
