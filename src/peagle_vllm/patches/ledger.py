"""What a seam says about itself, and the definitions of vLLM that it depends on.

Each seam file declares its ``SEAM`` above its code: why it exists and when it can be deleted. Which definitions of
vLLM it depends on is not written by hand: ``tools/seams`` finds them in the source and records them in
``fingerprints.json``. Imports neither vLLM nor torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

How = Literal["wrapped", "replaced", "inherited", "called"]
HOWS: tuple[How, ...] = get_args(How)
What = Literal["body", "signature"]
Runner = Literal["V1", "V2", "both", "CPU"]


@dataclass(frozen=True)
class Definition:
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
    what: What

    @property
    def key(self) -> str:
        """Its name in ``fingerprints.json``: ``"vllm.config.vllm:VllmConfig.__post_init__ wrapped signature"``."""
        return f"{self.module}:{self.qualname} {self.how} {self.what}"

    @classmethod
    def of_key(cls, key: str) -> "Definition":
        path, how, what = key.split(" ")
        module, qualname = path.split(":")
        return cls(module, qualname, cast(How, how), cast(What, what))

    @property
    def path(self) -> str:
        """Module and qualified name."""
        return f"{self.module}.{self.qualname}"


@dataclass(frozen=True, kw_only=True)
class Seam:
    """One place where this package changes what vLLM does, and when that ends.

    Attributes:
        name: the file's, with hyphens: what is printed, and what PEAGLE_VLLM_ACCEPT takes.
        obsolete_if_missing: a text in the source of the modules that the seam depends on. Once it is in none of
            them, what the seam waits for has landed and the seam is not needed any more. Empty: vLLM's source
            alone does not show it.
        types: types of names in the seam's code that no annotation gives: name -> "module:Class" in vLLM.
        also: definitions that the seam's code does not name, by module: vLLM's code that calls it, or on which it
            relies beyond what it calls itself.
    """

    name: str
    runner: Runner
    why: str
    waits_for: str
    delete_when: str
    obsolete_if_missing: str = ""
    types: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not re.fullmatch("[a-z]+(-[a-z]+)*", self.name):
            raise ValueError(f"a seam's name is words with hyphens, not {self.name!r}")
