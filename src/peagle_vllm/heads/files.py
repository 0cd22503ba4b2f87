"""The files of a head: headers through safetensors' own parser, and single small tensors. Never a pickle."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    import numpy as np

INDEX = "model.safetensors.index.json"
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


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises HeadError for anything else."""
    try:
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
    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: TensorInfo(name, tuple(part.get_shape()), str(part.get_dtype()), path.name)
                for name, part in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise HeadError(f"{path} is no whole safetensors file ({one_line(error)}); download it again") from None


def read_values(path: Path, tensor: str) -> "np.ndarray":
    """One tensor's values, bf16 widened to float32; nothing else of the file is read.

    safetensors' numpy reader knows no bf16, and importing torch for one vector would be heavy.
    """
    import numpy as np

    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            info = json.loads(file.read(length))[tensor]
            begin, end = info["data_offsets"]
            file.seek(8 + length + begin)
            raw = file.read(end - begin)
    except (OSError, ValueError, KeyError) as error:
        raise HeadError(f"{tensor} cannot be read ({one_line(error)}): {path}; download it again") from None
    if info["dtype"] not in NUMPY:
        raise HeadError(f"{tensor} is stored as {info['dtype']}, needs a plain number type: {path}; save it as F32")
    values = np.frombuffer(raw, NUMPY[info["dtype"]]) if raw else np.empty(0, NUMPY[info["dtype"]])
    if info["dtype"] == "BF16":
        values = (values.astype("<u4") << 16).view("<f4")
    return values.reshape(info["shape"])


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
