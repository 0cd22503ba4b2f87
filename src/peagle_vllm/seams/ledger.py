"""What a seam says about itself. A seam is one place where this package touches vLLM.

Each seam file declares its ``SEAM`` right above its code, so that whoever reads the code knows why
it exists and when it can be deleted; ``doctor``, the fingerprints and ``docs/seams.md`` read the same
declaration. Imports neither vLLM nor torch.
"""

import re
from dataclasses import dataclass
from typing import Literal

How = Literal["wrapped", "replaced", "inherited", "called"]
What = Literal["body", "signature"]
Runner = Literal["V1", "V2", "both", "CPU"]


@dataclass(frozen=True)
class Touch:
    """One definition in vLLM that this package wraps, replaces, inherits or calls.

    ``qualname`` is looked up in the source of ``module``: a function, a class, a method, a class or
    module attribute, a name that the module imports (then its origin is what is compared), an
    instance attribute (``Class.name``: every place where ``self.name`` is set), or the calls of a
    method of one (``Class.name.method``: every ``self.name.method(...)`` with its arguments).

    ``what="body"`` compares the whole definition. ``what="signature"`` compares only what a caller
    sees: parameters of a function; decorators, bases, fields and method signatures of a class.
    """

    module: str
    qualname: str
    how: How
    what: What = "body"

    @property
    def key(self) -> str:
        """The touch's name in ``fingerprints.json``."""
        return f"{self.module}:{self.qualname}:{self.what}"

    @property
    def path(self) -> str:
        """The touch as a reader says it: module and qualified name."""
        return f"{self.module}.{self.qualname}"


@dataclass(frozen=True, kw_only=True)
class Seam:
    """One place where this package touches vLLM, and when that ends.

    ``name`` is the file's, with hyphens: what is printed, and what PEAGLE_VLLM_ACCEPT takes.
    ``obsolete_if_missing`` is a text in the source of the touched modules: once it is in none of
    them, what the seam waits for has landed and the seam is not needed any more. Empty: vLLM's
    source alone cannot tell.
    """

    name: str
    runner: Runner
    why: str
    waits_for: str
    delete_when: str
    touches: tuple[Touch, ...]
    obsolete_if_missing: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch("[a-z]+(-[a-z]+)*", self.name):
            raise ValueError(f"a seam's name is words with hyphens, not {self.name!r}")
        if not self.touches:
            raise ValueError(f"seam {self.name} touches nothing")
        keys = [touch.key for touch in self.touches]
        if len(set(keys)) != len(keys):
            raise ValueError(f"seam {self.name} names a touch twice")


def touches(module: str, how: How, *names: str, of: str = "", what: What = "body") -> tuple[Touch, ...]:
    """One touch a name, all in one module, of one class if ``of`` names it, and of one kind."""
    return tuple(Touch(module, f"{of}.{name}" if of else name, how, what) for name in names)
