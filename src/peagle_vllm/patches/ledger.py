"""What a patch says about itself, and the definitions of vLLM that it depends on.

Each patch file declares its ``PATCH``, with the definitions of vLLM that must look as they did when it was written.
``tools/record.py`` records those in ``fingerprints.json``. Imports neither vLLM nor torch.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Runner = Literal["V1", "V2", "both", "CPU"]
Hook = Callable[[Any], None]  # called with a module of vLLM once that is imported
Replacement = Callable[..., Any]

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
        return f"{self.module}.{self.qualname.removesuffix(PRESENCE)}"


def members(owner: str, names: str) -> tuple[str, ...]:
    """``members("A", "b c")`` is ``("A.b", "A.c")``, for ``Patch.depends_on``."""
    return tuple(f"{owner}.{name}" for name in names.split())


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One place where this package changes what vLLM does. docs/architecture.md says why, and when that ends.

    Attributes:
        name: the file's, with hyphens: what is printed, and what PEAGLE_VLLM_ACCEPT takes.
        depends_on: definitions by module, as in ``Definition``: what the patch replaces, what its classes override,
            and what their code repeats. Not what it merely calls: `make test-next` finds changes of that.
        hooks: what installs it, each with the module of vLLM that it waits for.
        wrapped: definitions that it depends on, too.
    """

    name: str
    runner: Runner
    depends_on: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    hooks: list[tuple[str, Hook]] = field(default_factory=list, hash=False)
    wrapped: list[Definition] = field(default_factory=list, hash=False)

    @property
    def definitions(self) -> tuple[Definition, ...]:
        listed = (Definition(module, name) for module, names in self.depends_on.items() for name in names)
        return (*self.wrapped, *listed)

    def wraps(self, module: str, qualname: str, compare: bool = True) -> Callable[[Replacement], Replacement]:
        """Decorate what is to be called in place of a function or method: with the original, then its arguments."""

        def declare(replacement: Replacement) -> Replacement:
            self.hooks.append((module, functools.partial(_wrap, qualname, replacement)))
            self.wrapped.extend([Definition(module, qualname)] if compare else [])
            return replacement

        return declare


_SENTINEL = "_peagle_vllm_patch"


def _wrap(qualname: str, replacement: Replacement, module: Any) -> None:
    """A second time changes nothing. The original stays reachable as ``__wrapped__``."""
    *outer, name = qualname.split(".")
    owner = functools.reduce(getattr, outer, module)
    original = getattr(owner, name)
    if hasattr(original, _SENTINEL):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(wrapper, _SENTINEL, True)
    setattr(owner, name, wrapper)
