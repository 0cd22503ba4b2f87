"""docs/seams.md: the ledger as a page. ``make docs`` writes it."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from peagle_vllm.seams.fingerprint import Recorded
from peagle_vllm.seams.ledger import HOWS, Definition, Seam

_HEAD = """\
<!-- Written by `make docs` from the seams and fingerprints.json; edit the seams, not this page. -->
# The ledger: where vLLM is changed, and what that depends on

Each file in `src/peagle_vllm/seams/` is a seam: one place where this package changes what vLLM does. Below
stands what each of them wraps, replaces, inherits or calls in vLLM, although vLLM promises nothing about it.
The lists are found in the source of both (`tools/seams`), and the source of each definition is fingerprinted
in `fingerprints.json`. The version number of a vLLM decides nothing: a nightly, a vendor's build or a patch
release is served where every definition is as it was recorded for one minor version, whichever that is. Where
one differs, P-EAGLE is refused in one line that names the seam; every other configuration runs as before.

`PEAGLE_VLLM_ACCEPT=seam[,seam]` serves P-EAGLE although these seams have moved, with one warning a start: for
users who have looked at what `peagle-vllm doctor` lists and found that it does not matter. Where something to
wrap or to replace is gone, it does not help.

## A new vLLM is out

1. `pip download vllm==X --no-deps`
2. `peagle-vllm doctor --vllm vllm-X*.whl` names every definition that moved.
3. Look at each of them, in both versions, and mend the seam.
4. `python -m tools.seams.record --vllm vllm-X*.whl`; add a new minor version to the extras in
   `pyproject.toml`. Builds of one release can differ (the CPU build patches files of its own), so each
   is recorded beside the others, and for each definition it is enough to match one of them. A seam that
   uses something else of vLLM than before is recorded again for every build.
5. `make docs`, then `make test`.

A definition is compared whole, comments, docstrings and formatting aside.

- ° only the signature counts: parameters; for a class, its fields and the signatures of its methods
- † not the same in every recorded version
"""


def render(seams: Iterable[Seam], recorded: Recorded) -> str:
    """Markdown: how to adopt a release, an overview, one table a seam."""
    digests = {seam: _digests(seam, recorded) for seam in seams}
    sections = (line for seam, own in digests.items() for line in _seam(seam, own))
    return "\n".join([_HEAD, *_overview(digests), *sections])


Digests = dict[Definition, list[frozenset[str | None]]]  # of each minor version, those of its builds


def _digests(seam: Seam, recorded: Recorded) -> Digests:
    versions = [[build[seam.name] for build in builds.values()] for builds in recorded.values()]
    keys = sorted({key for builds in versions for build in builds for key in build})
    return {
        Definition.of_key(key): [frozenset(build.get(key) for build in builds) for builds in versions] for key in keys
    }


def _overview(digests: dict[Seam, Digests]) -> Iterator[str]:
    yield "| seam | runner | definitions | delete when |"
    yield "|---|---|---|---|"
    for seam, own in digests.items():
        yield f"| [{seam.name}](#{seam.name}) | {seam.runner} | {len(own)} | {seam.delete_when} |"
    yield ""


def _seam(seam: Seam, digests: Digests) -> Iterator[str]:
    yield f"## {seam.name}"
    yield ""
    yield f"**Runner** {seam.runner}. **Why** {seam.why}"
    yield ""
    yield f"**Waits for** {seam.waits_for}. **Delete when** {seam.delete_when}."
    if seam.obsolete_if_missing:
        yield f'doctor calls it "not needed" once `{seam.obsolete_if_missing}` is gone from vLLM\'s source.'
    yield ""
    yield "| how | module | what |"
    yield "|---|---|---|"
    by_how = sorted(digests, key=lambda each: (HOWS.index(each.how), each.module, each.qualname))
    for (how, module), group in groupby(by_how, key=lambda each: (each.how, each.module)):
        names: dict[str, list[str]] = {}
        for each in group:
            owner, _, name = each.qualname.partition(".")
            marks = ("°" if each.what == "signature" else "") + ("†" if len(set(digests[each])) > 1 else "")
            names.setdefault(owner, []).append(f"`{name or owner}`{marks}")
        cells = (
            ", ".join(of) if of[0].startswith(f"`{owner}`") else f"`{owner}`: {', '.join(of)}"
            for owner, of in names.items()
        )
        yield f"| {how} | `{module}` | {'; '.join(cells)} |"
    yield ""
