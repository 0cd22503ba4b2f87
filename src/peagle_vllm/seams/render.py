"""The ledger as a page: ``python -m peagle_vllm.seams.render > docs/seams.md``."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from peagle_vllm.seams import all_seams
from peagle_vllm.seams.fingerprint import Recorded, load_recorded
from peagle_vllm.seams.ledger import Seam, Touch

_ORDER = ("wrapped", "replaced", "inherited", "called")
_HEAD = """\
<!-- Written by `python -m peagle_vllm.seams.render > docs/seams.md`; edit the seams, not this page. -->
# The ledger: where vLLM is touched

Everything of vLLM that this package wraps, replaces, inherits or calls although vLLM promises
nothing about it, one seam a file in `src/peagle_vllm/seams/`. The source of each touched definition
is fingerprinted. What a vLLM calls itself decides nothing: a nightly, a vendor's build or a patch
release is served where every touched definition is as it was recorded for one minor version, whichever
that is. Where one differs, P-EAGLE is refused in one line that names the seam; every other
configuration runs on untouched.

`PEAGLE_VLLM_ACCEPT=seam[,seam]` serves P-EAGLE although these seams have moved, with one warning a
start: for who has looked at what `peagle-vllm doctor` lists and found that it does not matter. Where
something to wrap or to replace is gone there is nothing to accept.

## A new vLLM is out

1. `pip download vllm==X --no-deps`
2. `peagle-vllm doctor --vllm vllm-X*.whl` names every touch that moved.
3. Look at each of them, in both versions, and mend the seam.
4. `python -m peagle_vllm.seams.record --vllm vllm-X*.whl`; add a new minor version to the extras in
   `pyproject.toml`. Builds of one release can differ (the CPU build patches files of its own), so each
   is recorded beside the others, and for each touch matching one of them is enough.
5. `python -m peagle_vllm.seams.render > docs/seams.md`, then `make test`.

A touch is compared whole, comments, docstrings and formatting aside.

- ° only the signature counts: parameters; for a class, its fields and the signatures of its methods
- † not the same in every recorded version
"""


def render(seams: Iterable[Seam], recorded: Recorded) -> str:
    """Markdown: how to adopt a release, an overview, one table a seam."""
    seams = tuple(seams)
    return "\n".join([_HEAD, *_overview(seams), *(line for seam in seams for line in _seam(seam, recorded))])


def _overview(seams: tuple[Seam, ...]) -> Iterator[str]:
    yield "| seam | runner | touches | delete when |"
    yield "|---|---|---|---|"
    for seam in seams:
        yield f"| [{seam.name}](#{_anchor(seam.name)}) | {seam.runner} | {len(seam.touches)} | {seam.delete_when} |"
    yield ""


def _seam(seam: Seam, recorded: Recorded) -> Iterator[str]:
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
    touches = sorted(seam.touches, key=lambda touch: (_ORDER.index(touch.how), touch.module))
    for (how, module), group in groupby(touches, key=lambda touch: (touch.how, touch.module)):
        names: dict[str, list[str]] = {}
        for touch in group:
            owner, _, name = touch.qualname.partition(".")
            marks = ("°" if touch.what == "signature" else "") + ("†" if _differs(touch, recorded) else "")
            names.setdefault(owner, []).append(f"`{name or owner}`{marks}")
        cells = (
            ", ".join(of) if of[0].startswith(f"`{owner}`") else f"`{owner}`: {', '.join(of)}"
            for owner, of in names.items()
        )
        yield f"| {how} | `{module}` | {'; '.join(cells)} |"
    yield ""


def _differs(touch: Touch, recorded: Recorded) -> bool:
    return len({frozenset(_known(touch, trees)) for trees in recorded.values()}) > 1


def _known(touch: Touch, trees: Mapping[str, Mapping[str, str | None]]) -> set[str | None]:
    return {digests[touch.key] for digests in trees.values() if touch.key in digests}


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


if __name__ == "__main__":
    print(render(all_seams(), load_recorded()), end="")
