"""Every number of a head, read once in pieces: is one NaN or Inf?"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from peagle_vllm.heads.files import HeadError, TensorInfo, data_ranges, one_line
from peagle_vllm.heads.head import Head

PIECE = 16 << 20  # bytes read at a time; a multiple of every number's size
# dtype -> (unsigned twin, exponent bits): all of them set is NaN or Inf
EXPONENTS = {
    "F64": ("<u8", 0x7FF0000000000000),
    "F32": ("<u4", 0x7F800000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
Advance = Callable[[int], None]


def is_finite(raw: bytes, dtype: str) -> bool:
    """Whether no number in ``raw`` is NaN or Inf. Dtypes that have neither, or are scaled, pass."""
    import numpy as np

    if dtype not in EXPONENTS or not raw:
        return True
    twin, bits = EXPONENTS[dtype]
    return not bool(((np.frombuffer(raw, twin) & np.array(bits, twin)) == bits).any())


def pieces(file: IO[bytes], offset: int, length: int) -> Iterator[bytes]:
    """``length`` bytes from ``offset`` on, PIECE at a time."""
    file.seek(offset)
    while length:
        raw = file.read(min(PIECE, length))
        if not raw:
            raise OSError("the file ends early")
        length -= len(raw)
        yield raw


def check_values(head: Head, advance: Advance = lambda count: None) -> Iterator[str]:
    """One line that names the first tensor with NaN or Inf and counts the others; ``advance`` hears of bytes read."""
    if head.folder is None:
        return
    by_file: dict[str, list[TensorInfo]] = {}
    for name, info in sorted(head.tensors.items()):
        if name != "mask_hidden":  # judged in ``checks``
            by_file.setdefault(info.file, []).append(info)
    broken: list[TensorInfo] = []
    for name, infos in by_file.items():
        path = head.folder / name
        broken += [info for info in infos if not _finite_in(path, info, advance)]
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        yield (
            f"{broken[0].name} holds NaN or Inf{more}: {head.name}/{broken[0].file}; take the head's weights from "
            "their source again"
        )


def _finite_in(path: Path, info: TensorInfo, advance: Advance) -> bool:
    finite = True
    try:
        with path.open("rb") as file:
            for raw in pieces(file, *data_ranges(path)[info.name]):
                finite = finite and is_finite(raw, info.dtype)
                advance(len(raw))
    except (OSError, KeyError) as error:
        raise HeadError(f"{info.name} cannot be read ({one_line(error)}): {path}; download it again") from None
    return finite
