"""Wrapping one attribute of a vLLM class or module, once."""

import functools
from collections.abc import Callable
from typing import Any

_SENTINEL = "_peagle_vllm_patch"


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace ``owner.name`` by ``make(original)``. A second call changes nothing.

    The original stays reachable as ``__wrapped__``.
    """
    original = getattr(owner, name)
    if hasattr(original, _SENTINEL):
        return
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, _SENTINEL, True)
    setattr(owner, name, wrapper)
