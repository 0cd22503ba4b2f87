"""The files of a head: headers through safetensors' own parser, and single small tensors. Never a pickle."""

import json
import math
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    import numpy as np

INDEX = "model.safetensors.index.json"
MAX_JSON = 64 << 20  # bytes; configs and indices have kilobytes
BITS = {
    **{"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32},
    **{"F16": 16, "BF16": 16, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}
NUMPY = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U8": "|u1",
    "BOOL": "|b1",
}


class HeadError(ValueError):
    """A head that cannot be read. The message is one line: what, where, how to mend it."""

    def __init__(self, line: str):
        super().__init__(as_line(line))


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's header: its name in the file, shape, dtype in safetensors' words, and file name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * BITS.get(self.dtype, 8) // 8


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises HeadError for anything else, also for a pipe or a device, which would never end."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_JSON:
            raise HeadError(f"{path} is no file of at most {MAX_JSON >> 20} MB; take it from its source again")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise HeadError(f"{path} cannot be read ({error.strerror}); a head needs it") from None
    except (ValueError, RecursionError) as error:
        raise HeadError(f"{path} is no JSON ({one_line(error)}); take the file from its source again") from None
    if not isinstance(content, dict):
        raise HeadError(f"{path} holds a {type(content).__name__}, needs a JSON object; take it from its source again")
    return content


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor's header by its name in the file, from the safetensors files that vLLM would load.

    Those are the index's where there is one, else every ``*.safetensors`` of the folder, a later file winning.

    Raises:
        HeadError: a file is missing, damaged, or outside the folder.
    """
    promised = _index(folder)
    names = sorted(set(promised.values())) or sorted(path.name for path in folder.glob("*.safetensors"))
    tensors = {}
    for name in names:
        tensors.update(_headers_of(folder / name))
    for tensor, file in promised.items():
        if tensor not in tensors:
            raise HeadError(f"{folder / file} lacks {tensor}, which {INDEX} promises; take it from its source again")
    return tensors


def _index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    if not path.exists():
        return {}
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise HeadError(f"weight_map is missing: {path}; take the file from its source again")
    for file in weight_map.values():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file or "\0" in file:
            raise HeadError(f"weight_map names {shown(file)}, needs a *.safetensors file beside the index: {path}")
        if not is_file(folder / file):
            raise HeadError(f"{folder / file} is missing, and {INDEX} names it; download the head again")
    return weight_map


def is_file(path: Path) -> bool:
    """``Path.is_file``, false also for a name that no file can have."""
    try:
        return path.is_file()
    except OSError:
        return False


def _headers_of(path: Path) -> dict[str, TensorInfo]:
    if not is_file(path):
        raise HeadError(f"{path} is no file (a broken link, perhaps); download it again")
    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: TensorInfo(name, tuple(part.get_shape()), str(part.get_dtype()), path.name)
                for name, part in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise HeadError(f"{path} is no whole safetensors file ({one_line(error)}); download it again") from None


def data_ranges(path: Path) -> dict[str, tuple[int, int]]:
    """Where each tensor's bytes are in a safetensors file that ``read_headers`` has accepted: (offset, length)."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        begins = {name: info["data_offsets"] for name, info in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError) as error:
        raise HeadError(f"{path} is no whole safetensors file ({one_line(error)}); download it again") from None
    return {name: (8 + length + begin, end - begin) for name, (begin, end) in begins.items()}


def read_values(path: Path, info: TensorInfo) -> "np.ndarray":
    """One tensor's values, bf16 widened to float32; nothing else of the file is read.

    safetensors' numpy reader knows no bf16, and importing torch for one vector would be heavy.
    """
    ranges = data_ranges(path)
    if info.dtype not in NUMPY:
        raise HeadError(f"{info.name} is stored as {info.dtype}, needs a plain number type: {path}; save it as F32")
    try:
        offset, length = ranges[info.name]
        with path.open("rb") as file:
            file.seek(offset)
            raw = file.read(length)
        return as_values(raw, info.dtype).reshape(info.shape)
    except (OSError, ValueError, KeyError) as error:
        raise HeadError(f"{info.name} cannot be read ({one_line(error)}): {path}; download it again") from None


def as_values(raw: bytes, dtype: str) -> "np.ndarray":
    """A flat array of the numbers in ``raw``; bf16 widened to float32."""
    import numpy as np

    values = np.frombuffer(raw, NUMPY[dtype]) if raw else np.empty(0, NUMPY[dtype])
    return (values.astype("<u4") << 16).view("<f4") if dtype == "BF16" else values


def as_line(text: str) -> str:
    """A text as one printable line, whatever names from a file stand in it."""
    return " ".join(text.splitlines()).encode("utf-8", "backslashreplace").decode()


def one_line(error: object, limit: int = 120) -> str:
    """An error's text, cut to something that fits into a line."""
    text = as_line(str(error))
    return text if len(text) <= limit else f"{text[:limit]}..."


def shown(value: object) -> str:
    """A value from a config, as the file has it, short."""
    try:
        return one_line(json.dumps(value), 60)
    except (TypeError, ValueError):
        return type(value).__name__
