"""The files of a head: finding them, and reading config.json and safetensors headers and numbers. Never a pickle."""

import json
import logging
import math
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
MAX_JSON = 64 << 20  # bytes; configs and indices have kilobytes
PIECE = 8 << 20  # bytes of weights read at a time; a multiple of every number's size
FLOATS = ("F32", "F16", "BF16", "F64")
INTEGERS = ("I64", "I32", "I16", "I8", "U8")
NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "BOOL": "|b1"}
NUMPY |= {dtype: f"<{dtype[0].lower()}{int(dtype[1:]) // 8}" for dtype in INTEGERS}


class HeadError(ValueError):
    """A head that cannot be read. The message is one line: what, where, how to mend it."""

    def __init__(self, line: str):
        super().__init__(as_line(line))


class NotFoundError(HeadError):
    """A head that neither this machine nor the hub has."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's header, as safetensors has it; ``offset`` is its first byte in the file, 0 for a remote one."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    offset: int = 0

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bits(self) -> int:
        """Bits of one number: what the dtype's name says, and 8 for BOOL."""
        number = re.search(r"\d+", self.dtype)
        return int(number[0]) if number else 8

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.bits // 8


@dataclass(frozen=True)
class RemoteHead:
    """A head on the hub, without its weights."""

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


# ----------------------------------------------------------------------------------------------- finding


def find(model: str, revision: str | None = None) -> Path | RemoteHead:
    """Find a head without downloading its weights.

    Args:
        model: a folder or a hub id; ``revision`` is a branch, tag or commit there.

    Returns:
        The folder, which may be in the hub's cache; or the headers, when the hub alone has the head.

    Raises:
        NotFoundError: neither can be reached; the line says why.
        HeadError: the head's files are damaged.
    """
    try:
        found = _search(model, revision)
    except HeadError:
        raise
    except Exception as error:
        raise NotFoundError(
            f"{model} is no folder, and the hub does not give it ({one_line(error)}); check the name"
        ) from None
    if found is None:
        raise NotFoundError(
            f"{model} is no folder and not in the hub's cache, and HF_HUB_OFFLINE is set; name a folder, or unset it"
        )
    return found


def locate(model: str, revision: str | None = None) -> Path | RemoteHead | None:
    """The same, or None where it is not found: vLLM, which needs the weights, then says best what is wrong."""
    try:
        return find(model, revision)
    except NotFoundError as error:
        logger.debug("no headers: %s", error)
        return None


def download(model: str, revision: str | None = None) -> Path:
    """The folder of a head with its weights, fetched from the hub where it is not on this machine.

    Raises:
        HeadError: it cannot be had.
    """
    found = find(model, revision)
    if isinstance(found, Path):
        return found
    try:
        import huggingface_hub as hub

        return Path(hub.snapshot_download(model, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:
        raise HeadError(f"{model} cannot be downloaded ({one_line(error)}); try again") from None


def _search(model: str, revision: str | None) -> Path | RemoteHead | None:
    if Path(model).is_dir():
        return Path(model)
    import huggingface_hub as hub
    from huggingface_hub import constants

    cached = hub.try_to_load_from_cache(model, "config.json", revision=revision)
    if isinstance(cached, str) and _has_weights(Path(cached).parent):
        return Path(cached).parent
    if constants.HF_HUB_OFFLINE:
        return None
    metadata = hub.get_safetensors_metadata(model, revision=revision)
    config = read_json(Path(hub.hf_hub_download(model, "config.json", revision=revision)))
    tensors = {
        name: TensorInfo(name, tuple(info.shape), info.dtype, file)
        for file, header in metadata.files_metadata.items()
        for name, info in header.tensors.items()
    }
    return RemoteHead(model, config, tensors)


def _has_weights(snapshot: Path) -> bool:
    """Whether a snapshot of the cache holds every safetensors file; it may hold the config alone."""
    if not (snapshot / INDEX).exists():
        return any(snapshot.glob("*.safetensors"))
    weight_map = read_json(snapshot / INDEX).get("weight_map")
    return isinstance(weight_map, dict) and all(is_file(snapshot / str(file)) for file in weight_map.values())


# ----------------------------------------------------------------------------------------------- reading


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises HeadError for anything else, also for a pipe or a device, which would never end."""
    try:
        status = path.stat()
        fits = stat.S_ISREG(status.st_mode) and status.st_size <= MAX_JSON
        content = json.loads(path.read_bytes()) if fits else None
    except OSError as error:
        raise HeadError(f"{path} cannot be read ({error.strerror}); a head needs it") from None
    except (ValueError, RecursionError) as error:
        raise HeadError(f"{path} is no JSON ({one_line(error)}); take the file from its source again") from None
    if not fits:
        raise HeadError(f"{path} is no regular file of at most {MAX_JSON >> 20} MB; take it from its source again")
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


def _headers_of(path: Path) -> dict[str, TensorInfo]:
    if not is_file(path):
        raise HeadError(f"{path} is no file (a broken link, perhaps); download it again")
    try:
        with safe_open(path, framework="np"), path.open("rb") as file:  # safe_open refuses a damaged file
            data = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(data - 8))
    except (SafetensorError, OSError, ValueError) as error:
        raise HeadError(f"{path} is no whole safetensors file ({one_line(error)}); download it again") from None
    header.pop("__metadata__", None)
    return {
        name: TensorInfo(name, tuple(entry["shape"]), entry["dtype"], path.name, data + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def read_pieces(folder: Path, info: TensorInfo) -> Iterator[bytes]:
    """The bytes of one tensor, at most PIECE at a time. Raises HeadError where they cannot be read."""
    path, left = folder / info.file, info.num_bytes
    try:
        with path.open("rb") as file:
            file.seek(info.offset)
            while left:
                raw = file.read(min(PIECE, left))
                if not raw:
                    raise OSError("the file ends early")
                left -= len(raw)
                yield raw
    except OSError as error:
        raise HeadError(f"{info.name} cannot be read ({one_line(error)}): {path}; download it again") from None


def read_tensor(folder: Path, info: TensorInfo) -> "np.ndarray":
    """One tensor's numbers, of a dtype in NUMPY; bf16 widened to float32. Raises HeadError as ``read_pieces`` does.

    safetensors' NumPy reader knows no bf16, and importing torch for one vector would take seconds.
    """
    return as_numbers(b"".join(read_pieces(folder, info)), info.dtype).reshape(info.shape)


def as_numbers(raw: bytes, dtype: str) -> "np.ndarray":
    """A flat array of the numbers in ``raw``; bf16 widened to float32."""
    import numpy as np

    numbers = np.frombuffer(raw, NUMPY[dtype]) if raw else np.empty(0, NUMPY[dtype])
    return (numbers.astype("<u4") << 16).view("<f4") if dtype == "BF16" else numbers


def is_finite(raw: bytes, dtype: str) -> bool:
    """Whether no number in ``raw`` is NaN or Inf. Dtypes that have neither, or are scaled, pass."""
    import numpy as np

    if dtype == "BF16":  # all exponent bits set is NaN or Inf; seven times as fast as widening first
        return not ((np.frombuffer(raw, "<u2") & 0x7F80) == 0x7F80).any()
    return dtype not in FLOATS or bool(np.isfinite(as_numbers(raw, dtype)).all())


def is_file(path: Path) -> bool:
    """``Path.is_file``, false also for a name that no file can have."""
    try:
        return path.is_file()
    except OSError:
        return False


# -------------------------------------------------------------------------------------------------- text


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
