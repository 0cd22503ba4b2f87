"""A fingerprint moves with what a definition does, and with nothing else."""

import ast
from pathlib import Path
from textwrap import dedent

import pytest

from peagle_vllm.patches.ledger import Definition
from peagle_vllm.patches.source import Source
from tests.patches.trees import fake

BASE = dedent('''
    """Module."""
    from vllm.elsewhere import Other, Thing as Named

    LIMIT = 1e-5

    @dataclass
    class Batch:
        """Docstring."""
        ids: list[int]
        """What an attribute's docstring says."""
        size: int = 0

        def grow(self, by: int, *, fast: bool = False) -> int:
            """Grow."""
            # why
            self.total = self.size + by
            return f"{self.total:>{by}} of {self.size!r}" "!"

        def _private(self, x):
            self.drafter.propose(x, limit=1)
            return x

    if LIMIT:
        def function(a, b=2):
            return a + b
    else:
        def function(a, b=3):
            return a - b
''')


def digest(tmp_path: Path, text: str, qualname: str) -> str | None:
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    return Source(fake(folder, {"mod.py": text})).digest(Definition("vllm.mod", qualname))


# Without comments, in another format and with other docstrings, or none.
SAME = ast.unparse(ast.parse(BASE)).replace('"""Grow."""', '"""Another text."""').replace('    """Docstring."""\n', "")


@pytest.mark.parametrize("qualname", ["LIMIT", "Batch", "Batch.grow", "Batch.size", "function", "Other", "Named"])
def test_comments_docstrings_and_formatting_do_not_count(tmp_path: Path, qualname: str) -> None:
    first = digest(tmp_path, BASE, qualname)
    assert first is not None
    assert SAME.count("Another text") == 1 and "Docstring" not in SAME and "# why" not in SAME
    assert digest(tmp_path, SAME, qualname) == first


@pytest.mark.parametrize(
    ("qualname", "old", "new"),
    [
        ("LIMIT", "1e-5", "1e-6"),
        ("Batch", "ids: list[int]", "ids: list[int] | None"),
        ("Batch", "@dataclass", "@dataclass(frozen=True)"),
        ("Batch.grow", "self.size + by", "self.size - by"),
        ("Batch.grow", "fast: bool = False", "fast: bool = True"),
        ("Batch.grow", "of {self", "off {self"),
        ("Batch.grow", ":>{by}", ":<{by}"),
        ("Batch.grow", "self.size!r", "self.size!s"),
        ("Batch.size", "size: int = 0", "size: int = 1"),
        ("function", "a - b", "b - a"),
        ("Other", "vllm.elsewhere", "vllm.moved"),
        ("Named", "Thing as Named", "Else as Named"),
    ],
)
def test_what_it_does_counts(tmp_path: Path, qualname: str, old: str, new: str) -> None:
    assert old in BASE
    assert digest(tmp_path, BASE, qualname) != digest(tmp_path, BASE.replace(old, new), qualname)


@pytest.mark.parametrize("qualname", ["Gone", "Batch.gone", "Batch.total", "Gone.grow", "function.inner", "Gone(...)"])
def test_what_is_gone_has_no_digest(tmp_path: Path, qualname: str) -> None:
    assert digest(tmp_path, BASE, qualname) is None
    assert Source(tmp_path).digest(Definition("vllm.gone", qualname)) is None


def test_what_only_has_to_be_there_may_change(tmp_path: Path) -> None:
    changed = BASE.replace("self.size + by", "self.size - by")
    assert digest(tmp_path, BASE, "Batch.grow(...)") == digest(tmp_path, changed, "Batch.grow(...)") is not None


def test_digests_are_the_same_on_every_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded on one Python, checked on another: these were computed on 3.11, 3.12 and 3.13."""
    names = ("Batch", "function", "Named")
    recorded = ["9a1105d300046e6f", "8766ac2451ac2f40", "106eead21a6c0778"]
    assert [digest(tmp_path, BASE, name) for name in names] == recorded

    class LikePython312(ast.NodeTransformer):
        def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.JoinedStr:
            self.generic_visit(node)
            return ast.JoinedStr([*node.values, ast.Constant("")])

    parse = ast.parse
    monkeypatch.setattr(ast, "parse", lambda text: LikePython312().visit(parse(text)))
    assert [digest(tmp_path, BASE, name) for name in names] == recorded
