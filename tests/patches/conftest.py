"""Most trees here differ in one module from the installed vLLM: parse each text once."""

import ast
import functools
from collections.abc import Iterator

import pytest

from peagle_vllm.patches.source import Source


@pytest.fixture(scope="session", autouse=True)
def parse_each_text_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Source, "parse", staticmethod(functools.cache(ast.parse)))
        yield
