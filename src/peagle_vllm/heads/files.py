"""The files of a head: finding them, and reading config.json and safetensors files. Pickled weights are never read."""

import json
import math
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    import numpy as np

INDEX = "model.safetensors.index.json"
# A sharpened head: its config's field, and the folder of its candidate selector.
SELECTOR, SELECTOR_FOLDER = "candidate_selector", "edge"
SPECFORGE_FILE, SPECFORGE_KEYS = "peagle_config.json", ("mask_token_id", "norm_before_residual", "num_depths")
MAX_JSON = 64 << 20  # bytes; configs and indices have kilobytes
# How NumPy reads safetensors' dtypes. It has no bf16, which is read as whole numbers and widened.
FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
INTEGERS = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1", "U8": "|u1"}
NUMPY = FLOATS | INTEGERS | {"BOOL": "|b1"}


class HeadError(ValueError):
    """A head that cannot be read. The message is one line: what, where, how to correct it."""

    def __init__(self, line: str):
        super().__init__(as_line(line))


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
class HeadFiles:
    """What the files of a head hold but for its weights."""

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    commit: str | None = None


def find(model: str, revision: str | None = None) -> Path | HeadFiles:
    """Find a head, by its folder or hub id, without downloading its weights.

    Returns the folder, which may be in the hub's cache; or the headers, where only the hub has the weights. HeadError
    where the head is neither here nor on the hub, or its files are damaged.
    """
    try:
        if Path(model).is_dir():
            return Path(model)
        if Path(model).exists():
            raise HeadError(f"{model} is a file; name its folder")
        import huggingface_hub as hub
        from huggingface_hub import constants

        commit = revision
        if not constants.HF_HUB_OFFLINE:
            with suppress(Exception):  # without a connection the cache is all there is
                commit = hub.model_info(model, revision=revision).sha  # a branch may have moved
        cached = hub.try_to_load_from_cache(model, "config.json", revision=commit)
        if isinstance(cached, str) and _has_weights(Path(cached).parent):
            return Path(cached).parent
        if constants.HF_HUB_OFFLINE:
            raise OSError("it is not in the hub's cache, and HF_HUB_OFFLINE is set")
        config = Path(hub.hf_hub_download(model, "config.json", revision=commit))
        commit, tensors = commit_of(config.parent), {}
        headers = hub.get_safetensors_metadata(model, revision=commit or revision)  # a branch may have moved since
        for file, header in headers.files_metadata.items():
            for name, info in header.tensors.items():
                begin, end = info.data_offsets
                tensors[name] = TensorInfo(name, tuple(info.shape), info.dtype, file, end - begin)
        if read_json(config).get("architectures") == ["PEagleDraftModel"]:
            with suppress(Exception):
                hub.hf_hub_download(model, SPECFORGE_FILE, revision=commit)
        return HeadFiles(model, read_config(config.parent), tensors, commit)
    except HeadError:
        raise
    except Exception as error:  # the hub's client has many kinds
        raise HeadError(f"{model} is not a folder, and {hub_failure(error, 'it')}") from None


def commit_of(folder: Path) -> str | None:
    """The commit whose files a folder of the hub's cache holds; None for any other folder."""
    is_cached = folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--")
    return folder.name if is_cached else None


def hub_failure(error: Exception, what: str) -> str:
    """Why the hub does not give ``what``, and what to do."""
    return f"the hub does not give {what} ({one_line(error)}); check the name and the connection, or name a folder"


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
    files = _indexed_files(snapshot)
    if SELECTOR in read_json(snapshot / "config.json") and not any((snapshot / SELECTOR_FOLDER).glob("*.safetensors")):
        return False
    return all((snapshot / file).is_file() for file in files) if files else any(snapshot.glob("*.safetensors"))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises HeadError for anything else, also for a pipe or a device, which would never end."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_JSON:
            raise ValueError(f"it is no regular file of at most {MAX_JSON >> 20} MB")
        content = json.loads(path.read_text("utf-8"))  # json guesses an encoding of bytes; vLLM does not
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, no JSON object")
    except OSError as error:
        raise HeadError(f"{path} cannot be read ({error.strerror}); check the path, or download it again") from None
    except (ValueError, RecursionError) as error:
        raise HeadError(f"{path} is not valid JSON ({one_line(error)}); take the file from its source again") from None
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """A head's config.json, completed by what SpecForge's train_peagle.py states beside it."""
    content, beside = read_json(folder / "config.json"), folder / SPECFORGE_FILE
    stated = read_json(beside) if beside.is_file() else {}
    return content | {key: value for key, value in stated.items() if key in SPECFORGE_KEYS and content.get(key) is None}


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor's header by its name in the file, from the safetensors files that vLLM would load.

    Those are the index's where there is one, else every ``*.safetensors`` of the folder, which need not exist; where
    two hold the same tensor, the later file counts. HeadError where one is missing, damaged, or outside the folder.
    """
    names = _indexed_files(folder)
    if missing := [name for name in sorted(names) if not (folder / name).is_file()]:
        raise HeadError(f"{folder / missing[0]} is missing, and {INDEX} names it; download it again")
    files = [path for path in sorted(folder.glob("*.safetensors")) if not names or path.name in names]
    ofs = [match[1] for path in files if (match := re.search(r"-of-0*(\d+)\.safetensors$", path.name))]
    if not names and files and len(ofs) == len(files) < int(ofs[0]):  # a copy that broke off before the index
        raise HeadError(f"{files[0]} is there, without {int(ofs[0]) - len(files)} more of its kind; download them too")
    return {name: info for path in files for name, info in _read_header(path).items()}


def _indexed_files(folder: Path) -> set[str]:
    """The names of the files that the index names; empty without an index."""
    path = folder / INDEX
    if not path.exists():
        return set()
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise HeadError(f"weight_map is missing: {path}; take the file from its source again")
    return set(map(str, weight_map.values()))


def _read_header(path: Path) -> dict[str, TensorInfo]:
    try:
        if not path.is_file():
            raise OSError("it is missing, or no regular file")
        with safe_open(path, framework="np"), path.open("rb") as file:  # safe_open refuses a damaged file
            data = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(data - 8))
    except (SafetensorError, OSError, ValueError) as error:
        raise HeadError(f"{path} is not a complete safetensors file ({one_line(error)}); download it again") from None
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = TensorInfo(name, tuple(entry["shape"]), entry["dtype"], path.name, end - begin, data + begin)
    return tensors


def read_tensor(folder: Path, info: TensorInfo) -> bytes:
    """The bytes of one tensor. Raises HeadError if they cannot be read."""
    path = folder / info.file
    try:
        with path.open("rb") as file:
            file.seek(info.offset)
            return file.read(info.num_bytes)
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


def as_line(text: str) -> str:
    """A text as one printable line, whatever names from a file stand in it."""
    line = " ".join(text.expandtabs(1).splitlines())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def one_line(error: object, limit: int = 120) -> str:
    """An error's text, cut to something that fits into a line."""
    text = as_line(str(error))
    return text if len(text) <= limit else f"{text[:limit]}..."


def shown(value: object) -> str:
    """A value from a config, as the file has it, short."""
    return one_line(json.dumps(value, default=lambda other: type(other).__name__), 60)
