"""The verdict on a vLLM: holds, changed, accepted; and which release it looks like."""

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
from peagle_vllm.patches.version import VllmInstall, read
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
