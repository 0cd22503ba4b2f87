"""The verdict on a vLLM: holds, changed, accepted; which release it looks like; finding it without importing it."""

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.resources.abc import Traversable
from pathlib import Path

import pytest

import peagle_vllm.patches
from peagle_vllm.patches import all_patches
from peagle_vllm.patches.fingerprint import Report, check, load_recorded
from peagle_vllm.patches.ledger import Patch
from peagle_vllm.patches.source import Source
from peagle_vllm.patches.version import NotVllmError, VllmInstall, read
from tests.patches.trees import fake, installed, next_release
from tools import record


def build(root: Traversable, *patches: Patch) -> dict[str, str]:
    """What is recorded of a tree."""
    source = Source(root)
    return {definition.key: source.digest(definition) or "" for patch in patches for definition in patch.definitions}


def two_patches(folder: Path, a: str, b: str | None, version: str = "0.40.0", accepted: tuple[str, ...] = ()) -> Report:
    """A vLLM whose functions ``a`` and ``b``, one patch each, return these words. Recorded are builds of 0.32 that
    return "old" or "cpu build" in both, and one of 0.33 that returns "new"."""

    def tree(name: str, *words: str | None) -> Path:
        text = "\n".join(f"def {f}():\n    return {word!r}" for f, word in zip("ab", words, strict=True) if word)
        return fake(folder / name, {"mod.py": text}, version)

    patches = [Patch(name=f, runner="V2", depends_on={"vllm.mod": (f,)}) for f in "ab"]

    def digests(word: str) -> dict[str, str]:
        return build(tree(word, word, word), *patches)

    recorded = {"0.32": {word: digests(word) for word in ("old", "cpu build")}, "0.33": {"new": digests("new")}}
    return check(read(tree("asked", a, b)), patches, recorded, frozenset(accepted))


@pytest.mark.parametrize(
    ("vllm", "minor", "changed", "accepted"),
    [
        (("new", "new"), "0.33", "", ""),
        (("old", "cpu build"), "0.32", "", ""),
        (("new", None), "0.33", "b", ""),
        # Each definition is as some release had it, but no release had both.
        (("old", "new", "0.32.1"), "0.32", "b", ""),
        (("old", "new"), "0.33", "a", ""),
        # Accepted by name.
        (("new", "other", "0.40.0", "b"), "0.33", "", "b"),
        (("other", "other", "0.40.0", "b"), "0.33", "a", "b"),
        (("old", "new", "0.40.0", "b"), "0.32", "", "b"),
        (("new", "new", "0.40.0", "b"), "0.33", "", ""),
    ],
)
def test_it_is_like_one_minor_version(tmp_path: Path, vllm: tuple, minor: str, changed: str, accepted: str) -> None:
    report = two_patches(tmp_path, *vllm)
    names = ("".join(result.patch.name for result in results) for results in (report.changed, report.accepted))
    assert (report.compared_with, *names) == (minor, changed, accepted)


@pytest.mark.parametrize("release", [installed, next_release], ids=["installed", "next"])
def test_the_patches_fit_vllm(release: Callable[[], VllmInstall]) -> None:
    report = check(release())
    assert not report.changed, [
        change.definition.path + " " + change.change for result in report.changed for change in result.changed
    ]
    assert {result.status for result in report.results} == {"holds"}
    assert report.compared_with == report.install.minor


def test_what_is_listed_is_what_is_recorded() -> None:
    """Each definition of some recorded build, and no build holds others: `python -m tools.record` for each build."""
    listed = {definition.key for patch in all_patches() for definition in patch.definitions}
    builds = [build for builds in load_recorded().values() for build in builds.values()]
    assert listed == {key for build in builds for key in build}


def test_recording_a_build_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch = Patch(name="gate", runner="V2", depends_on={"vllm.config": ("Config",)})
    monkeypatch.setattr(record, "all_patches", lambda: (patch,))
    install, old = read(fake(tmp_path, {"config.py": "class Config: pass"})), {"vllm.gone:Gone": "0"}
    before = {"0.32": {install.label: old, "vllm old": old}, "0.4": {"vllm 0.4.0": old}}
    after = record.record(install, before)
    assert list(after) == ["0.4", "0.32"]
    assert after["0.4"]["vllm 0.4.0"] == after["0.32"]["vllm old"] == old
    assert after["0.32"][install.label] == build(install.root, patch)


def test_every_patch_is_installed_by_a_hook() -> None:
    files = [
        file for file in Path(peagle_vllm.patches.__file__).parent.glob("*.py") if "\nPATCH = " in file.read_text()
    ]
    assert {patch.name for patch in all_patches() if patch.hooks} == {file.stem.replace("_", "-") for file in files}


def test_the_ledger_and_doctor_import_no_vllm() -> None:
    code = (
        "import sys, peagle_tools.doctor.compatibility_report\n"
        "from peagle_vllm.patches import all_patches, fingerprint, version\n"
        "assert all_patches() and not {'vllm', 'torch'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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
