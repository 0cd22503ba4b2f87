"""A fingerprint moves with what a definition does, and with nothing else. The verdict on a vLLM is made of them: holds,
changed, accepted; which release it looks like; finding it without importing it. ``doctor`` prints it."""

import ast
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.resources.abc import Traversable
from pathlib import Path
from textwrap import dedent

import pytest

import peagle_vllm.patches
from peagle_tools.doctor.compatibility_report import plugin_state
from peagle_vllm.patches import all_patches
from peagle_vllm.patches.fingerprint import Report, check, load_recorded
from peagle_vllm.patches.ledger import Definition, Patch
from peagle_vllm.patches.source import Source
from peagle_vllm.patches.version import VllmInstall, find_vllm, read
from tests.support.command import only_line, run
from tools import record

BASE = dedent('''
    """Module."""
    from vllm.elsewhere import Other, Thing as Named

    LIMIT = 1e-5

    @dataclass
    class Batch:
        """Docstring."""
        ids: list[int]
        """What an attribute's docstring says."""
        size: int = 0

        def grow(self, by: int, *, fast: bool = False) -> int:
            """Grow."""
            # why
            self.total = self.size + by
            return f"{self.total:>{by}} of {self.size!r}" "!"

        def _private(self, x):
            self.drafter.propose(x, limit=1)
            return x

    if LIMIT:
        def function(a, b=2):
            return a + b
    else:
        def function(a, b=3):
            return a - b
''')


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


def digest(tmp_path: Path, text: str, qualname: str) -> str | None:
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    return Source(fake(folder, {"mod.py": text})).digest(Definition("vllm.mod", qualname))


# Without comments, in another format and with other docstrings, or none.
SAME = ast.unparse(ast.parse(BASE)).replace('"""Grow."""', '"""Another text."""').replace('    """Docstring."""\n', "")


@pytest.mark.parametrize("qualname", ["LIMIT", "Batch", "Batch.grow", "Batch.size", "function", "Other", "Named"])
def test_comments_docstrings_and_formatting_do_not_count(tmp_path: Path, qualname: str) -> None:
    first = digest(tmp_path, BASE, qualname)
    assert first is not None
    assert SAME.count("Another text") == 1 and "Docstring" not in SAME and "# why" not in SAME
    assert digest(tmp_path, SAME, qualname) == first


@pytest.mark.parametrize(
    ("qualname", "old", "new"),
    [
        ("LIMIT", "1e-5", "1e-6"),
        ("Batch", "ids: list[int]", "ids: list[int] | None"),
        ("Batch", "@dataclass", "@dataclass(frozen=True)"),
        ("Batch.grow", "self.size + by", "self.size - by"),
        ("Batch.grow", "fast: bool = False", "fast: bool = True"),
        ("Batch.grow", "of {self", "off {self"),
        ("Batch.grow", ":>{by}", ":<{by}"),
        ("Batch.grow", "self.size!r", "self.size!s"),
        ("Batch.size", "size: int = 0", "size: int = 1"),
        ("function", "a - b", "b - a"),
        ("Other", "vllm.elsewhere", "vllm.moved"),
        ("Named", "Thing as Named", "Else as Named"),
    ],
)
def test_what_it_does_counts(tmp_path: Path, qualname: str, old: str, new: str) -> None:
    assert old in BASE
    assert digest(tmp_path, BASE, qualname) != digest(tmp_path, BASE.replace(old, new), qualname)


@pytest.mark.parametrize("qualname", ["Gone", "Batch.gone", "Batch.total", "Gone.grow", "function.inner", "Gone(...)"])
def test_what_is_gone_has_no_digest(tmp_path: Path, qualname: str) -> None:
    assert digest(tmp_path, BASE, qualname) is None
    assert Source(tmp_path).digest(Definition("vllm.gone", qualname)) is None


def test_what_only_has_to_be_there_may_change(tmp_path: Path) -> None:
    changed = BASE.replace("self.size + by", "self.size - by")
    assert digest(tmp_path, BASE, "Batch.grow(...)") == digest(tmp_path, changed, "Batch.grow(...)") is not None


def test_digests_are_the_same_on_every_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded on one Python, checked on another: these were computed on 3.11, 3.12 and 3.13."""
    names = ("Batch", "function", "Named")
    recorded = ["9a1105d300046e6f", "8766ac2451ac2f40", "106eead21a6c0778"]
    assert [digest(tmp_path, BASE, name) for name in names] == recorded

    class LikePython312(ast.NodeTransformer):
        def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.JoinedStr:
            self.generic_visit(node)
            return ast.JoinedStr([*node.values, ast.Constant("")])

    parse = ast.parse
    monkeypatch.setattr(ast, "parse", lambda text: LikePython312().visit(parse(text)))
    assert [digest(tmp_path, BASE, name) for name in names] == recorded


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
    changes = [change for result in report.changed for change in result.changed]
    assert not report.changed, [f"{change.definition.path} {change.change}" for change in changes]
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
    files = Path(peagle_vllm.patches.__file__).parent.glob("*.py")
    names = {file.stem.replace("_", "-") for file in files if "\nPATCH = " in file.read_text()}
    assert {patch.name for patch in all_patches() if patch.hooks} == names


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
    with pytest.raises(ValueError) as refused:
        read(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_installed_vllm_is_found_as_it_names_itself() -> None:
    install, spec = installed(), importlib.util.find_spec("vllm")
    assert importlib.metadata.version(install.distribution).partition("+")[0] == install.version.partition("+")[0]
    assert spec is not None and spec.origin == str(install.root.joinpath("vllm/__init__.py"))


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PEAGLE_VLLM_DISABLE", "PEAGLE_VLLM_ACCEPT", "VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")


def test_it_reports_on_the_installed_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = run("doctor")
    assert ran.exit_code == 0, ran.output
    install = installed()
    for text in (peagle_vllm.__version__, install.version, install.distribution, importlib.metadata.version("torch")):
        assert text in ran.output
    assert re.search(r"plugin +loaded by vLLM", ran.output)
    assert max(map(len, ran.output.splitlines())) <= 80

    variables = {"VLLM_USE_V2_MODEL_RUNNER": "0", "PEAGLE_VLLM_DISABLE": "1", "VLLM_PLUGINS": "another"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ran = run("doctor")
    assert ran.exit_code == 1
    assert all(re.search(rf"{name} +{value}", ran.output) for name, value in variables.items())
    assert re.search(r"plugin +left out by VLLM_PLUGINS=another", ran.output)


def test_why_vllm_does_not_load_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    for plugins, state in (("other, peagle", "left out by"), ("other,peagle", "loaded by vLLM")):
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
        assert plugin_state().startswith(state)
    for value, state in (("0", "loaded by vLLM"), ("true", "switched off by PEAGLE_VLLM_DISABLE=true")):
        monkeypatch.setenv("PEAGLE_VLLM_DISABLE", value)
        assert plugin_state() == state
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    assert plugin_state().startswith("not installed as an entry point")


def test_a_changed_patch_is_named_with_its_definitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is exit status 1, unless the patch is accepted."""
    root = copy_of_used(tmp_path)
    file = root / "vllm/v1/worker/gpu/spec_decode/speculator.py"
    text = file.read_text()
    assert "self.idx_mapping.fill_(-1)" in text, "choose another place to doctor"
    file.write_text(text.replace("self.idx_mapping.fill_(-1)", "pass"))
    definition = "DraftModelSpeculator._copy_request_inputs"
    for accepted, state in (("gate", "changed"), ("head-config,v2-speculator", "accepted")):
        monkeypatch.setenv("PEAGLE_VLLM_ACCEPT", accepted)
        ran = run("doctor", "--vllm", root)
        assert ran.exit_code == (state == "changed")
        assert re.search(rf"speculator +V2 +{state}", ran.output) and re.search(r"gate +V2 +holds", ran.output)
        lines = " ".join(ran.output.split())
        assert re.search(rf"v2-speculator: \S+{re.escape(definition)} [0-9a-f]{{8}} -> [0-9a-f]{{8}}", lines)
        assert ("refused: vLLM" in lines) == (state == "changed")

    assert "no: No such file or directory" in only_line(run("doctor", "--vllm", tmp_path / "no"))
    monkeypatch.setenv("PEAGLE_VLLM_ACCEPT", "head config")
    line = only_line(run("doctor", "--vllm", root))
    assert line.startswith("peagle-vllm: 'head config' is no patch: PEAGLE_VLLM_ACCEPT")


def test_a_nightly_is_compared_with_what_it_looks_like(tmp_path: Path) -> None:
    """Over another one's library, as tools/next.py makes it."""
    root = copy_of_used(tmp_path)
    (root / "vllm" / "_version.py").write_text('__version__ = "0.99.0.dev1+cpu.over.0.32.0"\n')
    ran = run("doctor", "--vllm", root)
    assert ran.exit_code == 0
    assert re.search(r"vLLM +0\.99\.0\.dev1\+cpu", ran.output)
    assert re.search(rf"looks like +{installed().minor}; this version itself is not recorded", ran.output)


def test_no_vllm_exits_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle_vllm.patches.version.find_vllm", lambda: None)
    ran = run("doctor")
    assert ran.exit_code == 1
    assert re.search(r"vLLM +not installed", ran.output) and "plugin" not in ran.output
