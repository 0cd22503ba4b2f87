"""vLLM's source as text: find a definition, and reduce it to what matters.

Nothing of vLLM is imported, so a wheel does as well as the installed package. A definition's digest does not change
with comments, docstrings or formatting, nor with the Python that computes it (``ast.dump`` would).
"""

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.resources.abc import Traversable

from peagle_vllm.patches.ledger import PRESENCE, Definition


class Source:
    """One vLLM source tree. Modules are parsed, and definitions digested, when first asked for."""

    def __init__(self, root: Traversable):
        self.root = root
        self.tree = cache(self._tree)
        self.digest = cache(self._digest)

    def _tree(self, module: str) -> ast.Module | None:
        """Syntax tree of a module, None if there is no such module or it does not parse."""
        path = module.replace(".", "/")
        files = (self.root.joinpath(name) for name in (f"{path}.py", f"{path}/__init__.py"))
        text = next((file.read_text(encoding="utf-8") for file in files if file.is_file()), "")
        try:
            return ast.parse(text) if text else None
        except SyntaxError:  # written for a newer Python than this one
            return None

    def _digest(self, definition: Definition) -> str | None:
        """16 hex digits, or None where the definition is gone. A name can be bound more than once: all count."""
        tree = self.tree(definition.module)
        scopes: list[ast.AST] = [tree] if tree else []
        *outer, name = definition.qualname.removesuffix(PRESENCE).split(".")
        for part in outer:
            scopes = [node for scope in scopes for node in _bound(scope, part) if isinstance(node, ast.ClassDef)]
        nodes = [node for scope in scopes for node in _bound(scope, name)]
        if not nodes:
            return None
        text = "" if definition.qualname.endswith(PRESENCE) else "\n".join(_body(node, name) for node in nodes)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _bound(scope: ast.AST, name: str) -> Iterator[ast.AST]:
    """What binds ``name`` directly in a module or class, also under if, try and with."""
    for node in _statements(scope):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                if node.name == name:
                    yield node
            case ast.Assign(targets=targets):
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    yield node
            case ast.AnnAssign(target=ast.Name(id=target)):
                if target == name:
                    yield node
            case ast.Import() | ast.ImportFrom():
                if any((alias.asname or alias.name) == name for alias in node.names):
                    yield node


def _statements(scope: ast.AST) -> Iterator[ast.stmt]:
    for block in ("body", "handlers", "orelse", "finalbody"):
        for node in getattr(scope, block, ()):
            if isinstance(node, ast.stmt):
                yield node
            if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                yield from _statements(node)


def _body(node: ast.AST, name: str) -> str:
    """The whole definition; of an import only what it binds to ``name``."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        origin = getattr(node, "module", None) or ""
        level = getattr(node, "level", 0)
        return f"{'.' * level}{origin}:{[a.name for a in node.names if (a.asname or a.name) == name]}"
    return _plain(node)


_SKIPPED = {"ctx", "kind", "type_comment", "type_ignores"}


def _plain(node: object) -> str:
    """A syntax tree as text: no docstrings, no empty fields, the same on every Python version."""
    match node:
        case ast.JoinedStr(values=values):  # Python 3.12 puts empty literals into format specifications
            return f"JoinedStr{_plain([part for part in values if getattr(part, 'value', None) != ''])}"
        case ast.Constant(value=value):
            return f"{type(value).__name__}:{value!r}"
        case ast.AST():
            fields = ((field, value) for field, value in ast.iter_fields(node) if field not in _SKIPPED)
            kept = (f"{field}={_plain(value)}" for field, value in fields if value not in (None, []))
            return f"{type(node).__name__}({', '.join(kept)})"
        case list():
            return f"[{', '.join(_plain(item) for item in node if not _is_docstring(item))}]"
    return repr(node)


def _is_docstring(node: object) -> bool:
    """A string that is a statement: documentation of what stands above it."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
