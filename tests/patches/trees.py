"""vLLM source trees to check: made up, copied and doctored, installed, and the next release's wheel."""

import os
from pathlib import Path

import pytest

from peagle_vllm.patches import all_patches
from peagle_vllm.patches.version import VllmInstall, find_vllm, read


def fake(folder: Path, files: dict[str, str], version: str = "0.32.0", distribution: str = "vllm") -> Path:
    """A folder that holds a ``vllm/`` of these files (path inside ``vllm/`` -> text) and its metadata."""
    stated = f"__version__ = version = {version!r}\n"
    for name, text in {"__init__.py": "", "_version.py": stated, **files}.items():
        file = folder / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {distribution}\nVersion: {version}\n")
    (info / "RECORD").write_text("vllm/__init__.py,,\n")
    return folder


def installed() -> VllmInstall:
    install = find_vllm()
    assert install, "vLLM is not installed: run the suite with `make test`"
    return install


def next_release() -> VllmInstall:
    """The other supported release, from its own wheel or from a folder that it was unpacked to."""
    path = os.environ.get("PEAGLE_VLLM_NEXT_WHEEL")
    if not path:
        pytest.fail(
            "PEAGLE_VLLM_NEXT_WHEEL is not set: `make test` sets it to vLLM 0.33.0's wheel; "
            "by hand, `pip download vllm==0.33.0 --no-deps`"
        )
    return read(path)


def copy_of_used(folder: Path) -> Path:
    """The modules of the installed vLLM that the patches depend on, copied to ``folder`` to be changed."""
    install = installed()
    paths = {definition.module.replace(".", "/") for patch in all_patches() for definition in patch.definitions}
    names = [f"{path}{end}" for path in paths for end in (".py", "/__init__.py")]
    files = {name.removeprefix("vllm/"): install.root.joinpath(name) for name in names}
    texts = {name: file.read_text() for name, file in files.items() if file.is_file()}
    return fake(folder, texts, install.version, install.distribution)


def change(root: Path, module: str, old: str, new: str) -> None:
    """Replace ``old``, which must be there, in a module of a copied tree."""
    path = root / f"{module.replace('.', '/')}.py"
    text = path.read_text()
    assert old in text, f"{module} has no {old!r}: choose another place to doctor"
    path.write_text(text.replace(old, new))
