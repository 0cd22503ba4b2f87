"""What the compiler makes of both kernels: ``python -m benchmarks.compile_report [--out FILE]``. Needs no GPU.

Compiles ``prepare_inputs`` and ``gather_hidden`` ahead of time for sm_90 and sm_100 over the shapes that the suite
compiles, and records registers, shared memory, spills, and the widths of the global loads and stores in machine code.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from triton.backends.nvidia.compiler import get_ptxas

from benchmarks import compiling
from benchmarks.arms import write_result
from peagle_vllm.provenance import provenance

FIELDS = ("kernel", "arch", "layout", "kv_groups", "aux", "width", "dtype", "idx_dtype")
# name of a shape -> what compiles it
Shapes = Iterator[tuple[dict[str, Any], Callable[[], compiling.Assembled]]]


def shapes(arch: int) -> Shapes:
    """Every shape that the suite compiles, and how."""
    for num_groups, num_aux, dtype, idx_dtype in compiling.EXPAND_SHAPES:
        for static in (True, False):
            for width in [compiling.WIDTH, *([compiling.WIDTHS["multiple of 8"]] if num_aux == 3 else [])]:
                name = {
                    "kernel": "prepare_inputs",
                    "layout": "static" if static else "ragged",
                    "kv_groups": num_groups,
                    "aux": num_aux,
                    "width": width,
                    "dtype": str(dtype),
                    "idx_dtype": str(idx_dtype),
                }
                args = (arch, static, num_groups, num_aux, dtype, idx_dtype, width)
                yield name, lambda args=args: compiling.prepare_inputs(*args)
    for width in compiling.WIDTHS.values():
        for dtype in compiling.DTYPES:
            name = {"kernel": "gather_hidden", "width": width, "dtype": str(dtype)}
            yield name, lambda dtype=dtype, width=width: compiling.gather_hidden(arch, dtype, width)


def compile_all(architectures: tuple[int, ...] = compiling.ARCHITECTURES) -> list[dict[str, Any]]:
    """One entry a kernel, architecture and shape: FIELDS that apply, then those of ``compiling.Assembled``."""
    return [
        {"arch": f"sm_{arch}", **name, **asdict(compile_one())}
        for arch in architectures
        for name, compile_one in shapes(arch)
    ]


def table(entries: list[dict[str, Any]]) -> str:
    """One line an entry; loads and stores as count x bits, the widest first."""

    def accesses(widths: dict[str, int]) -> str:
        return " ".join(f"{count}x{bits}" for bits, count in widths.items())

    lines = [f"{'kernel':42} {'registers':>9} {'shared':>6} {'spills':>6}  loads | stores (count x bits)"]
    for entry in entries:
        name = [str(entry[field]).removeprefix("torch.") for field in FIELDS if field in entry]
        figures = f"{entry['registers']:9} {entry['shared_bytes']:6} {entry['spill_bytes']:6}"
        lines.append(f"{' '.join(name):42} {figures}  {accesses(entry['loads'])} | {accesses(entry['stores'])}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    args = parser.parse_args()
    entries = compile_all()
    print(table(entries))
    assemblers = {f"sm_{arch}": get_ptxas(arch).version for arch in compiling.ARCHITECTURES}
    report = provenance() | {"device": "none: compiled ahead of time", "ptxas": assemblers, "kernels": entries}
    write_result(args.out, __doc__, report)


if __name__ == "__main__":
    main()
