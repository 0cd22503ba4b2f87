"""What the compiler makes of the kernels: ``python -m benchmarks.compile_report [--out FILE]``. Needs no GPU.

Every kernel of ``peagle_kernels`` for sm_90 and sm_100 over the shapes that the suite compiles: registers, shared
memory, spills, and the widths of the global loads and stores in machine code.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

from triton.backends.nvidia.compiler import get_ptxas

from benchmarks import arms
from peagle_tools.shared.provenance import provenance
from tests.support import compiled
from tests.support.compiled import ARCHITECTURES, Assembled

SELECTOR_FIELDS = ("rank", "candidates", "gated", "reduced", "drawn")


def shapes(arch: int) -> Iterator[tuple[dict[str, Any], Callable[[], Assembled]]]:
    """Every shape that the suite compiles, by its name in the result, and how."""
    for (groups, aux, dtype, idx_dtype), static in product(compiled.PREPARE_SHAPES, (True, False)):
        for width in (compiled.WIDTH, compiled.WIDTHS["multiple of 8"]) if aux == 3 else (compiled.WIDTH,):
            name = {"kernel": "prepare_inputs", "layout": "static" if static else "ragged", "kv_groups": groups}
            name |= {"aux": aux, "width": width, "dtype": str(dtype), "idx_dtype": str(idx_dtype)}
            yield name, partial(compiled.prepare_inputs, arch, static, groups, aux, dtype, idx_dtype, width)
    for width, dtype in product(compiled.WIDTHS.values(), compiled.DTYPES):
        name = {"kernel": "gather_hidden", "width": width, "dtype": str(dtype)}
        yield name, partial(compiled.gather_hidden, arch, dtype, width)
    for shape in compiled.SELECTOR_SHAPES:
        name = {"kernel": "select_candidates"} | dict(zip(SELECTOR_FIELDS, shape, strict=True))
        yield name, partial(compiled.select_candidates, arch, *shape)


def main() -> None:
    out = arms.parser(__doc__).parse_args().out
    entries = [
        {"arch": f"sm_{arch}", **name, **asdict(assembled())}
        for arch in ARCHITECTURES
        for name, assembled in shapes(arch)
    ]
    print(*map(json.dumps, entries), sep="\n")
    assemblers = {f"sm_{arch}": get_ptxas(arch).version for arch in ARCHITECTURES}
    report = {"device": "none: compiled ahead of time", "ptxas": assemblers, "kernels": entries}
    arms.write_result(out, __doc__, provenance() | report)


if __name__ == "__main__":
    main()
