"""vLLM's source as text: find a definition, and reduce it to what matters.

Works on source alone: nothing of vLLM is imported, so an unpacked wheel does as well as the
installed package. A definition's digest does not change with comments, docstrings or formatting,
nor with the Python that computes it (``ast.dump`` would).
"""

import ast
import functools
import hashlib
from collections.abc import Iterable, Iterator
from importlib.resources.abc import Traversable

from peagle_vllm.patches.ledger import Definition


class Source:
    """One vLLM source tree. Modules are parsed when first asked for."""

    def __init__(self, root: Traversable):
        self.root = root
        self._texts: dict[str, str | None] = {}
        self._trees: dict[str, ast.Module | None] = {}
        self.find = functools.cache(self._find)

    @staticmethod
    def parse(text: str) -> ast.Module:
        return ast.parse(text)

    def text(self, module: str) -> str | None:
        """Source of a module, None if there is no such module."""
        if module not in self._texts:
            path = module.replace(".", "/")
            files = (self.root.joinpath(name) for name in (f"{path}.py", f"{path}/__init__.py"))
            self._texts[module] = next((file.read_text(encoding="utf-8") for file in files if file.is_file()), None)
        return self._texts[module]

    def is_package(self, module: str) -> bool:
        return self.root.joinpath(module.replace(".", "/")).is_dir()

    def tree(self, module: str) -> ast.Module | None:
        """Syntax tree of a module, None if there is no such module or it does not parse."""
        if module not in self._trees:
            text = self.text(module)
            try:
                tree: ast.Module | None = None if text is None else self.parse(text)
            except SyntaxError:  # written for a newer Python than this one
                tree = None
            self._trees[module] = tree
        return self._trees[module]

    def _find(self, module: str, qualname: str) -> list[ast.AST]:
        """Every definition of ``qualname``, in order: a name can be bound more than once."""
        tree = self.tree(module)
        scopes: list[ast.AST] = [tree] if tree else []
        *outer, name = qualname.split(".")
        for depth, part in enumerate(outer):
            classes = [node for scope in scopes for node in bound(scope, part) if isinstance(node, ast.ClassDef)]
            if depth and not classes:  # no nested class: an instance attribute, whose calls are meant
                return [node for scope in scopes for node in _calls_on_self(scope, part, name)]
            scopes = [*classes]
        found = [node for scope in scopes for node in bound(scope, name)]
        if found or not outer:
            return found
        return [node for scope in scopes for node in set_on_self(scope, name)]

    def digest(self, definition: Definition) -> str | None:
        """16 hex digits, or None where the definition is gone."""
        nodes = self.find(definition.module, definition.qualname)
        if not nodes:
            return None
        name = definition.qualname.rpartition(".")[2]
        shape = _signature if definition.what == "signature" else _body
        text = "\n".join(shape(node, name) for node in nodes)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def bound(scope: ast.AST, name: str) -> Iterator[ast.AST]:
    """What binds ``name`` directly in a module or class, also under if, try and with."""
    for node in _statements(scope):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                if node.name == name:
                    yield node
            case ast.Assign(targets=targets):
                if any(_names(target, name) for target in targets):
                    yield node
            case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
                if _names(target, name):
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


def _names(target: ast.expr, name: str) -> bool:
    if isinstance(target, ast.Tuple | ast.List):
        return any(_names(element, name) for element in target.elts)
    return isinstance(target, ast.Name) and target.id == name


def set_on_self(scope: ast.AST, name: str) -> Iterator[ast.AST]:
    """Assignments to ``self.name`` in the methods of a class."""

    def sets(target: ast.expr) -> bool:
        if isinstance(target, ast.Tuple | ast.List):
            return any(sets(element) for element in target.elts)
        match target:
            case ast.Attribute(value=ast.Name(id="self"), attr=attr):
                return attr == name
        return False

    for method in _statements(scope):
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(method):
            match node:
                case ast.Assign(targets=targets) if any(sets(target) for target in targets):
                    yield node
                case ast.AnnAssign(target=target) if sets(target):
                    yield node


def _calls_on_self(scope: ast.AST, attribute: str, name: str) -> Iterator[ast.AST]:
    """Calls of ``self.attribute.name(...)`` in the methods of a class."""
    for node in ast.walk(scope):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr=owner), attr=called)):
                if (owner, called) == (attribute, name):
                    yield node


# ----------------------------------------------------------------------------------- normal forms


def _body(node: ast.AST, name: str) -> str:
    """The whole definition; of an import only what it binds to ``name``."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        origin = getattr(node, "module", None) or ""
        level = getattr(node, "level", 0)
        return f"{'.' * level}{origin}:{[a.name for a in node.names if (a.asname or a.name) == name]}"
    return _plain(node)


def _signature(node: ast.AST, name: str) -> str:
    """What a caller sees. Of a class: decorators, bases, fields, and methods that are not private."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return f"{_plain(node.decorator_list)}{type(node).__name__} {node.name}{_parameters(node.args)}"
        case ast.ClassDef():
            lines = [f"{_plain(node.decorator_list)}class {_plain(node.bases)}{_plain(node.keywords)}"]
            for member in _statements(node):
                match member:
                    case ast.FunctionDef(name=method) | ast.AsyncFunctionDef(name=method):
                        if not method.startswith("_") or method.endswith("__"):
                            lines.append(_signature(member, method))
                    case ast.AnnAssign() | ast.Assign():
                        lines.append(_signature(member, name))
            return "\n".join(lines)
        case ast.AnnAssign():
            return f"{_plain(node.target)}: has default {node.value is not None}"
        case ast.Assign():
            return _plain(node.targets)
    return _body(node, name)


def _parameters(args: ast.arguments) -> str:
    def named(group: Iterable[ast.arg | None]) -> list[str]:
        return [arg.arg for arg in group if arg]

    return "|".join(
        str(part)
        for part in (
            named(args.posonlyargs),
            named(args.args),
            named([args.vararg]),
            named(args.kwonlyargs),
            named([args.kwarg]),
            _plain(args.defaults),
            [default and _plain(default) for default in args.kw_defaults],
        )
    )


_SKIPPED = {"ctx", "kind", "type_comment", "type_ignores"}


def _plain(node: object) -> str:
    """A syntax tree as text: no docstrings, no empty fields, the same on every Python version."""
    match node:
        case ast.JoinedStr(values=values):  # Python 3.12 puts empty literals into format specifications
            return f"JoinedStr{_plain([part for part in values if not _is_empty_literal(part)])}"
        case ast.Constant(value=value):
            return f"{type(value).__name__}:{value!r}"
        case ast.AST():
            fields = ((field, value) for field, value in ast.iter_fields(node) if field not in _SKIPPED)
            kept = (f"{field}={_plain(value)}" for field, value in fields if value not in (None, []))
            return f"{type(node).__name__}({', '.join(kept)})"
        case list():
            return f"[{', '.join(_plain(item) for item in node if not _is_docstring(item))}]"
    return repr(node)


def _is_empty_literal(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == ""


def _is_docstring(node: object) -> bool:
    """A string that is a statement: documentation of what stands above it."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
