"""The tables of docs/ledger.md, the ledger as a page. ``make docs`` writes them."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from peagle_vllm.patches.fingerprint import Recorded
from peagle_vllm.patches.ledger import HOWS, Definition, Seam


def render(seams: Iterable[Seam], recorded: Recorded) -> str:
    """Markdown: an overview, one table a seam."""
    digests = {seam: _digests(seam, recorded) for seam in seams}
    sections = (line for seam, own in digests.items() for line in _seam(seam, own))
    return "\n".join([*_overview(digests), *sections])


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
