"""What our code takes from vLLM, read from both sources. ``test_ledger`` holds the ledger against it."""

import ast
import contextvars
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

import peagle_kernels
import peagle_vllm
from peagle_vllm.seams.ledger import Touch
from peagle_vllm.seams.source import Source


@dataclass(frozen=True)
class Use:
    """Something of vLLM that our code relies on.

    The ledger must name all of one of ``ways``, each a set of (module, qualname): for an attribute
    that is set on ``self``, either the attribute itself or every method that sets it.
    """

    name: str
    ways: tuple[frozenset[tuple[str, str]], ...]


@dataclass(frozen=True, eq=False)
class VllmClass:
    """A class of vLLM, by where it is defined."""

    module: str
    node: ast.ClassDef

    def at(self, name: str) -> tuple[str, str]:
        return self.module, f"{self.node.name}.{name}"

    def binds(self, name: str) -> bool:
        """Whether ``name`` is a method, or an attribute with a value, of the class body."""
        return any(_binds(statement, name) for statement in self.node.body)

    def setters(self, name: str) -> list[str]:
        """Methods that set ``self.name``."""
        return [method.name for method in self.methods if name in set(_of_self(method, ast.Store))]

    @property
    def methods(self) -> list[ast.FunctionDef]:
        return [item for item in self.node.body if isinstance(item, ast.FunctionDef)]


def uses_of_bases(source: Source, file: Path, class_name: str) -> list[Use]:
    """Everything that our ``class_name`` shares with its vLLM base classes.

    What it overrides, calls or reads through ``self`` and ``super()``; what those call through
    ``super()`` in turn; and the methods above it that call one which it overrides.
    """
    tree = ast.parse(file.read_text())
    node = next(item for item in tree.body if isinstance(item, ast.ClassDef) and item.name == class_name)
    above = list(_bases(source, tree, node, ""))
    assert above, f"{class_name} has no base class in vLLM"
    ours = VllmClass("", node)
    overridden = {method.name for method in ours.methods}
    uses = []

    for name in sorted({*overridden, *_of_self(node, ast.Load), *_of_self(node, ast.Store), *_of_super(node)}):
        chain = [cls for cls in above if cls.binds(name)]
        if chain:
            uses.append(_use(chain[0].at(name)))
            for cls, following in pairwise(chain):
                if not any(method.name == name and name in _of_super(method) for method in cls.methods):
                    break
                uses.append(_use(following.at(name)))
            continue
        setting = [cls for cls in above if cls.setters(name)]
        if setting:
            attribute = frozenset(cls.at(name) for cls in setting)
            methods = frozenset(cls.at(method) for cls in setting for method in cls.setters(name))
            uses.append(Use(name, (attribute, methods)))
        elif not (ours.binds(name) or ours.setters(name)):
            raise AssertionError(f"{class_name}.{name} is set neither by it nor by a base class in vLLM")

    for cls in above:
        for method in cls.methods:
            if method.name not in overridden and overridden & set(_of_self(method, ast.Load)):
                uses.append(_use(cls.at(method.name)))
    return uses


def imported_uses(source: Source, file: Path) -> list[Use]:
    """What a file of ours imports from vLLM, except what stands in annotations only.

    A class that annotates a parameter counts where an attribute of that parameter is read.
    """
    tree = ast.parse(file.read_text())
    annotations = {id(part) for note in _annotations(tree) for part in ast.walk(note)}
    used = {item.id for item in ast.walk(tree) if isinstance(item, ast.Name) and id(item) not in annotations}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            used |= set(_annotating_what_is_read(function))
    return [_use(_defined_at(source, *where)) for name, where in _imports(tree).items() if name in used]


def _use(touch: tuple[str, str]) -> Use:
    return Use(touch[1], (frozenset({touch}),))


def _imports(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Local name -> (module, name there), of every ``from vllm... import`` in the file."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm"
        for alias in node.names
    }


def _defined_at(source: Source, module: str, name: str) -> tuple[str, str]:
    """Where vLLM defines what ``from module import name`` gives; re-exports are followed."""
    for node in source.find(module, name):
        if isinstance(node, ast.ImportFrom):
            package = module if source.is_package(module) else module.rpartition(".")[0]
            for _ in range(node.level - 1):
                package = package.rpartition(".")[0]
            origin = f"{package}.{node.module}" if node.level else node.module
            assert origin is not None
            return _defined_at(source, origin, next(a.name for a in node.names if (a.asname or a.name) == name))
    return module, name


def _bases(source: Source, tree: ast.Module, node: ast.ClassDef, module: str) -> Iterator[VllmClass]:
    """vLLM's classes above ``node``, nearest first."""
    known = _imports(tree)
    for base in node.bases:
        if not isinstance(base, ast.Name):
            continue
        where, name = _defined_at(source, *known.get(base.id, (module, base.id)))
        for found in source.find(where, name):
            if isinstance(found, ast.ClassDef):
                yield VllmClass(where, found)
                above = source.tree(where)
                assert above is not None
                yield from _bases(source, above, found, where)


def _annotations(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        notes = (getattr(node, "annotation", None), getattr(node, "returns", None))
        yield from (note for note in notes if note is not None)


def _annotating_what_is_read(function: ast.FunctionDef) -> Iterator[str]:
    """Names in the annotations of parameters whose attributes the function reads."""
    attributes = (item for item in ast.walk(function) if isinstance(item, ast.Attribute))
    read = {attribute.value.id for attribute in attributes if isinstance(attribute.value, ast.Name)}
    for arg in [*function.args.args, *function.args.kwonlyargs]:
        if arg.annotation and arg.arg in read:
            yield from (part.id for part in ast.walk(arg.annotation) if isinstance(part, ast.Name))


def _binds(statement: ast.stmt, name: str) -> bool:
    match statement:
        case ast.FunctionDef(name=bound) | ast.AsyncFunctionDef(name=bound):
            return bound == name
        case ast.AnnAssign(target=ast.Name(id=bound), value=value):
            return bound == name and value is not None
        case ast.Assign(targets=targets):
            return any(isinstance(target, ast.Name) and target.id == name for target in targets)
    return False


def _of_self(node: ast.AST, context: type[ast.expr_context]) -> Iterator[str]:
    for item in ast.walk(node):
        match item:
            case ast.Attribute(value=ast.Name(id="self"), attr=attr, ctx=ctx) if isinstance(ctx, context):
                yield attr


def _of_super(node: ast.AST) -> Iterator[str]:
    for item in ast.walk(node):
        match item:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=attr):
                yield attr


# ------------------------------------------------------------------- attributes of vLLM's objects

_PYTHONS = (dict, list, set, str, tuple, int, float, type, contextvars.ContextVar, logging.Logger)
_NOT_VLLM = {"_replace"} | {name for kind in (*_PYTHONS, torch.Tensor, torch.dtype, np.ndarray) for name in dir(kind)}
_PACKAGES = {"peagle_vllm": Path(peagle_vllm.__file__).parent, "peagle_kernels": Path(peagle_kernels.__file__).parent}


def attributes_read(file: Path, classes: set[str]) -> set[str]:
    """Names of attributes that a file of ours takes from objects of vLLM, as far as names can tell.

    All but those of Python, torch, NumPy and of the classes of ours that the file defines or imports. What is taken
    from ``self`` in one of ``classes`` is left to ``uses_of_bases``.
    """
    tree = ast.parse(file.read_text())
    ours, imported = set(_members(tree)), {"super"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] != "vllm":
            imported |= {alias.asname or alias.name for alias in node.names}
            for source in {found for alias in node.names for found in _files_of(node.module, alias.name)}:
                ours |= set(_members(ast.parse(source.read_text())))
    inherited = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in classes]
    of_self = {id(item) for node in inherited for item in ast.walk(node) if _is_of_self(item)}
    nodes = [node for node in ast.walk(tree) if id(node) not in of_self]
    return {name for node in nodes for name in _attribute(node, imported)} - _NOT_VLLM - ours


def attributes_named(source: Source, touches: Iterable[Touch]) -> set[str]:
    """Names that these touches compare: their own, a class's members, and what a method sets on ``self``."""
    names = set()
    for touch in touches:
        names |= set(touch.qualname.split("."))
        for node in source.find(touch.module, touch.qualname):
            if isinstance(node, ast.ClassDef):
                names |= set(_members(node))
            elif touch.what == "body":
                names |= set(_of_self(node, ast.Store))
    return names


def _is_of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _attribute(node: ast.AST, imported: set[str]) -> Iterator[str]:
    """The attribute that ``node`` takes, by a dot or by getattr, unless of something that is imported, not vLLM's."""
    match node:
        case ast.Attribute(value=value, attr=attr):
            while isinstance(value, ast.Attribute | ast.Call | ast.Subscript):
                value = value.func if isinstance(value, ast.Call) else value.value
            if not (isinstance(value, ast.Name) and value.id in imported):
                yield attr
        case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(attr)), *_]):
            yield attr


def _files_of(module: str, name: str) -> Iterator[Path]:
    """The files of ours that ``from module import name`` reaches; re-exports are followed."""
    top, *inner = module.split(".")
    if top not in _PACKAGES:
        return
    path = _PACKAGES[top].joinpath(*inner)
    if (path / f"{name}.py").is_file():
        yield path / f"{name}.py"
        return
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    yield file
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and name in {alias.name for alias in node.names}:
            yield from _files_of(node.module, name)


def _members(tree: ast.AST) -> Iterator[str]:
    """What the classes of a file, or one class, define and set on themselves."""
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for item in node.body:
            match item:
                case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                    yield name
                case ast.Assign(targets=[ast.Name(id=name)]):
                    yield name
        yield from _of_self(node, ast.Store)
