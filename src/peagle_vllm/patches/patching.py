"""Wrapping one attribute of a vLLM class or module, once."""

import functools
from collections.abc import Callable
from typing import Any

_SENTINEL = "_peagle_vllm_patch"


def wrap(owner: Any, name: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorate what is to be called in place of ``owner.name``: with the original, then its arguments.

    A second time changes nothing. The original stays reachable as ``__wrapped__``.
    """

    def install(replacement: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        if hasattr(original, _SENTINEL):
            return

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        setattr(wrapper, _SENTINEL, True)
        setattr(owner, name, wrapper)

    return install
