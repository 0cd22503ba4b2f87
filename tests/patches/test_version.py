"""Finding a vLLM and its version, without importing it."""

import importlib.metadata
import importlib.util
import shutil
from pathlib import Path

import pytest

from peagle_vllm.patches.version import NotVllmError, read
from tests.patches.trees import fake, installed


@pytest.mark.parametrize("form", ["folder", "wheel"])
def test_a_vllm_is_read_in_every_form(tmp_path: Path, form: str) -> None:
    folder = fake(tmp_path / "unpacked", {}, version="0.33.1+cu130", distribution="vllm-gpu")
    install = read(folder if form == "folder" else shutil.make_archive(str(tmp_path / "wheel"), "zip", folder))
    assert (install.version, install.distribution, install.minor) == ("0.33.1+cu130", "vllm-gpu", "0.33")
    assert install.label == "vllm-gpu 0.33.1"
    assert install.root.joinpath("vllm/__init__.py").is_file()


@pytest.mark.parametrize("name", ["vllm-aaa", "vllm-zzz"])
def test_a_plugin_is_not_taken_for_vllm(tmp_path: Path, name: str) -> None:
    folder = fake(tmp_path, {}, version="0.32.0", distribution="vllm-mmm")
    other = folder / f"{name.replace('-', '_')}-0.32.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text(f"Name: {name}\nVersion: 0.32.0\n")
    (other / "RECORD").write_text("vllm_plugin/__init__.py,,\n")
    assert read(folder).distribution == "vllm-mmm"


@pytest.mark.parametrize("kind", ["missing", "vllm", "text"])
def test_a_path_without_vllm_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "vllm":
        path.mkdir()
    elif kind == "text":
        path.write_text("no wheel")
    with pytest.raises(NotVllmError) as refused:
        read(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_installed_vllm_is_found_as_it_names_itself() -> None:
    install, spec = installed(), importlib.util.find_spec("vllm")
    assert importlib.metadata.version(install.distribution).partition("+")[0] == install.version.partition("+")[0]
    assert spec is not None and spec.origin == str(install.root.joinpath("vllm/__init__.py"))
