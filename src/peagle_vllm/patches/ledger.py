"""What a patch says about itself, and the definitions of vLLM that it depends on.

Each patch file declares its ``PATCH`` above its code, with the definitions of vLLM that must look as they did when it
was written. ``tools/record.py`` records those in ``fingerprints.json``. Imports neither vLLM nor torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Runner = Literal["V1", "V2", "both", "CPU"]

PRESENCE = "(...)"  # the end of a definition that only has to be there


class Definition(NamedTuple):
    """A function, class, method, class attribute or imported name of vLLM.

    ``qualname`` is looked up in the source of ``module`` and compared whole; a name that is imported there is compared
    by where it comes from. Where it ends in ``(...)``, it only has to be there.
    """

    module: str
    qualname: str

    @property
    def key(self) -> str:
        """Its name in ``fingerprints.json``: ``"vllm.config.vllm:VllmConfig.__post_init__(...)"``."""
        return f"{self.module}:{self.qualname}"

    @property
    def path(self) -> str:
        """Module and qualified name."""
        return f"{self.module}.{self.qualname.removesuffix(PRESENCE)}"


def members(owner: str, names: str) -> tuple[str, ...]:
    """``members("A", "b c")`` is ``("A.b", "A.c")``, for ``Patch.depends_on``."""
    return tuple(f"{owner}.{name}" for name in names.split())


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One place where this package changes what vLLM does. docs/architecture.md says why, and when that ends.

    Attributes:
        name: the file's, with hyphens: what is printed, and what PEAGLE_VLLM_ACCEPT takes.
        depends_on: definitions by module, as in ``Definition``: what the patch wraps or replaces, what its classes
            override, and what their code repeats. Not what it merely calls: `make test-next` finds changes of that.
    """

    name: str
    runner: Runner
    depends_on: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)

    @property
    def definitions(self) -> tuple[Definition, ...]:
        return tuple(Definition(module, name) for module, names in self.depends_on.items() for name in names)
