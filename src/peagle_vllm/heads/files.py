"""The files of a head: finding them, and reading config.json and safetensors files. Pickled weights are never read."""

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    import numpy as np

INDEX = "model.safetensors.index.json"
# A sharpened head: its config's field, and the folder of its candidate selector.
SELECTOR, SELECTOR_FOLDER = "candidate_selector", "edge"
MAX_JSON = 64 << 20  # bytes; configs and indices have kilobytes
MAX_NAME = 200  # characters of a tensor's name, which lines show
PIECE = 8 << 20  # bytes of weights read at a time; a multiple of every number's size
# How NumPy reads safetensors' dtypes. It has no bf16, which is read as whole numbers and widened.
FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}
INTEGERS = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1", "U8": "|u1"}
NUMPY = FLOATS | INTEGERS | {"BOOL": "|b1"}


class HeadError(ValueError):
    """A head that cannot be read. The message is one line: what, where, how to correct it."""

    def __init__(self, line: str):
        super().__init__(as_line(line))


class NotFoundError(HeadError):
    """A head that is neither on this machine nor on the hub."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's entry in the header of a safetensors file; ``offset`` is its first byte in that file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    num_bytes: int
    offset: int = 0

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class RemoteHead:
    """A head on the hub, without its weights."""

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    commit: str | None = None


# ----------------------------------------------------------------------------------------------- finding


def find(model: str, revision: str | None = None) -> Path | RemoteHead:
    """Find a head without downloading its weights.

    Args:
        model: a folder or a hub id; ``revision`` is a branch, tag or commit there.

    Returns:
        The folder, which may be in the hub's cache; or the headers, where only the hub has the weights.

    Raises:
        NotFoundError: the head is neither here nor on the hub; the line gives the reason.
        HeadError: the head's files are damaged.
    """
    try:
        if Path(model).is_dir():
            return Path(model)
        import huggingface_hub as hub
        from huggingface_hub import constants

        cached = hub.try_to_load_from_cache(model, "config.json", revision=revision)
        if isinstance(cached, str) and _has_weights(Path(cached).parent):
            return Path(cached).parent
        if constants.HF_HUB_OFFLINE:
            where = "is not a folder and not in the hub's cache, and HF_HUB_OFFLINE is set"
            raise NotFoundError(f"{model} {where}; name a folder, or unset it")
        fetched = Path(hub.hf_hub_download(model, "config.json", revision=revision))
        revision, tensors = commit_of(fetched.parent) or revision, {}  # of one commit, whatever moves meanwhile
        for file, header in hub.get_safetensors_metadata(model, revision=revision).files_metadata.items():
            for name, info in header.tensors.items():
                begin, end = info.data_offsets
                tensors[name] = TensorInfo(name, tuple(info.shape), info.dtype, file, end - begin)
        return RemoteHead(model, read_json(fetched), tensors, commit_of(fetched.parent))
    except HeadError:
        raise
    except Exception as error:  # the hub's client has many kinds
        raise NotFoundError(f"{model} is not a folder, and {hub_failure(error, 'it')}") from None


def commit_of(folder: Path) -> str | None:
    """The commit whose files a folder of the hub's cache holds; None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" else None


UNREACHABLE = {"ConnectionError", "LocalEntryNotFoundError", "OfflineModeIsEnabled", "Timeout", "TransportError"}


def hub_failure(error: Exception, what: str) -> str:
    """Why the hub does not give ``what``, and what to do; by class names, because its HTTP library has changed."""
    if UNREACHABLE & {base.__name__ for base in type(error).__mro__}:
        return f"the hub cannot be reached ({one_line(error)}); check the connection, or name a folder"
    return f"the hub does not give {what} ({one_line(error)}); check the name"


def path_fault(model: str, revision: str | None = None) -> str | None:
    """The line for a head that is nowhere, for which vLLM would ask the hub for two minutes.

    None for what is there, for what has a scheme, and for a name that the hub may know. A name whose first part is a
    folder here is most likely a path: whether the hub knows it is asked once, for seconds.
    """
    if "://" in model or os.path.exists(model):  # noqa: PTH110  (never raises, as Path.exists can)
        return None
    where = "model in the speculative config"
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        remedy = "write the home folder out" if model.startswith("~") else "correct the path"
        return f"{model} is not on this machine: {where}; {remedy}"
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() == "true":  # another hub, with a cache of its own
        return None
    import huggingface_hub as hub
    from huggingface_hub import constants

    try:
        if isinstance(hub.try_to_load_from_cache(model, "config.json", revision=revision), str):
            return None
        if constants.HF_HUB_OFFLINE:
            missing = "is not on this machine and not in the hub's cache, and HF_HUB_OFFLINE is set"
            return f"{model} {missing}: {where}; correct the path, or unset it"
        if os.path.isdir(os.path.dirname(model)):  # noqa: PTH112, PTH120
            hub.model_info(model, revision=revision, timeout=5)
    except Exception as error:  # no name of the hub's, or one that it does not know
        return f"{as_line(model)} is not on this machine, and {hub_failure(error, 'it')}: {where}"
    return None


def download(model: str, revision: str | None = None) -> Path:
    """The folder of a head with its weights, fetched from the hub if necessary. Raises HeadError if that fails."""
    source = find(model, revision)
    if isinstance(source, Path):
        return source
    try:
        import huggingface_hub as hub

        return Path(hub.snapshot_download(model, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:
        raise HeadError(f"{model} cannot be downloaded ({one_line(error)}); try again") from None


def _has_weights(snapshot: Path) -> bool:
    """Whether a snapshot of the cache holds every safetensors file; it may hold the config alone.

    vLLM fetches what the index names, and that leaves a sharpened head's selector out.
    """
    files = set(_read_index(snapshot).values())
    if SELECTOR in read_json(snapshot / "config.json") and not any((snapshot / SELECTOR_FOLDER).glob("*.safetensors")):
        return False
    return all((snapshot / file).is_file() for file in files) if files else any(snapshot.glob("*.safetensors"))


# ----------------------------------------------------------------------------------------------- reading


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises HeadError for anything else, also for a pipe or a device, which would never end."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_JSON:
            limit = f"a regular file of at most {MAX_JSON >> 20} MB"
            raise HeadError(f"{path} is not {limit}; take it from its source again")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise HeadError(f"{path} cannot be read ({error.strerror}); check the path, or download it again") from None
    except HeadError:
        raise
    except (ValueError, RecursionError) as error:
        raise HeadError(f"{path} is not valid JSON ({one_line(error)}); take the file from its source again") from None
    if not isinstance(content, dict):
        raise HeadError(f"{path} holds a {type(content).__name__}, needs a JSON object; take it from its source again")
    return content


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor's header by its name in the file, from the safetensors files that vLLM would load.

    Those are the index's where there is one, else every ``*.safetensors`` of the folder, which need not exist; where
    two hold the same tensor, the later file counts.

    Raises:
        HeadError: a file is missing, damaged, or outside the folder.
    """
    weight_map = _read_index(folder)
    files = sorted(set(weight_map.values())) or sorted(path.name for path in folder.glob("*.safetensors"))
    tensors = {name: info for file in files for name, info in _read_header(folder / file).items()}
    for name, file in weight_map.items():
        if name not in tensors:
            raise HeadError(f"{folder / file} lacks {name}, which {INDEX} promises; take it from its source again")
    return tensors


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    if not path.exists():
        return {}
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise HeadError(f"weight_map is missing: {path}; take the file from its source again")
    for file in weight_map.values():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file or "\0" in file:
            raise HeadError(
                f"weight_map names {shown(file)}, needs a *.safetensors file in the folder of the index: {path}"
            )
    return weight_map


def _read_header(path: Path) -> dict[str, TensorInfo]:
    try:
        if not path.is_file():
            raise OSError("it is missing, or no regular file")
        with safe_open(path, framework="np"), path.open("rb") as file:  # safe_open refuses a damaged file
            data = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(data - 8), object_pairs_hook=_once_each)
    except (SafetensorError, OSError, ValueError) as error:
        raise HeadError(f"{path} is not a complete safetensors file ({one_line(error)}); download it again") from None
    header.pop("__metadata__", None)
    if longest := max((len(name) for name in header if len(name) > MAX_NAME), default=0):
        raise HeadError(f"{path} names a tensor of {longest} characters; take it from its source again")
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = TensorInfo(name, tuple(entry["shape"]), entry["dtype"], path.name, end - begin, data + begin)
    return tensors


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """safetensors and vLLM take the last of two entries with one name, whatever shape the first one claims."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("its header names something twice")
    return entries


def read_pieces(folder: Path, info: TensorInfo) -> Iterator[bytes]:
    """The bytes of one tensor, at most PIECE at a time, so that memory stays small. Raises HeadError if that fails."""
    path = folder / info.file
    try:
        with path.open("rb") as file:
            file.seek(info.offset)
            for begin in range(0, info.num_bytes, PIECE):
                yield file.read(min(PIECE, info.num_bytes - begin))
    except OSError as error:
        raise HeadError(f"{info.name} cannot be read ({one_line(error)}): {path}; download it again") from None


def as_numbers(raw: bytes, dtype: str) -> "np.ndarray":
    """A flat array of the numbers in ``raw``, of a dtype in NUMPY; bf16 widened to float32."""
    import numpy as np

    numbers = np.frombuffer(raw, NUMPY[dtype])
    return (numbers.astype("<u4") << 16).view("<f4") if dtype == "BF16" else numbers


def is_finite(raw: bytes, dtype: str) -> bool:
    """Whether no number in ``raw`` is NaN or Inf. Dtypes that have neither, or are scaled, pass."""
    import numpy as np

    if dtype == "BF16":  # all exponent bits set is NaN or Inf; seven times as fast as widening first
        return not ((np.frombuffer(raw, "<u2") & 0x7F80) == 0x7F80).any()
    return dtype not in FLOATS or bool(np.isfinite(as_numbers(raw, dtype)).all())


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
    return one_line(json.dumps(value, default=lambda other: type(other).__name__), 60)
