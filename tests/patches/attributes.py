"""Attributes that our code reads of objects which are neither Python's, torch's nor ours, by name alone."""

import ast
import contextvars
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

import peagle_kernels
import peagle_vllm
from peagle_vllm.patches.ledger import Definition
from peagle_vllm.patches.source import Source

_PYTHONS = (dict, list, set, str, tuple, int, float, type, contextvars.ContextVar, logging.Logger)
_NOT_VLLM = {"_replace"} | {name for kind in (*_PYTHONS, torch.Tensor, torch.dtype, np.ndarray) for name in dir(kind)}
_PACKAGES = {"peagle_vllm": Path(peagle_vllm.__file__).parent, "peagle_kernels": Path(peagle_kernels.__file__).parent}


def attributes_read(file: Path) -> set[str]:
    """Names of attributes that a file of ours takes from objects of vLLM, as far as names can tell.

    All but those of Python, torch, NumPy and of the classes of ours that the file defines or imports. What is taken
    from ``self`` belongs to a class of ours, so the finder has its type.
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
    nodes = (node for node in ast.walk(tree) if not _is_of_self(node))
    return {name for node in nodes for name in _attribute(node, imported)} - _NOT_VLLM - ours


def attributes_named(source: Source, definitions: Iterable[Definition]) -> set[str]:
    """Names that these definitions compare: their own, a class's members, and what a method sets on ``self``."""
    names = set()
    for each in definitions:
        names |= set(each.qualname.split("."))
        for node in source.find(each.module, each.qualname):
            if isinstance(node, ast.ClassDef):
                names |= set(_members(node))
            elif each.what == "body":
                names |= set(_set_on_self(node))
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
        yield from _set_on_self(node)


def _set_on_self(node: ast.AST) -> Iterator[str]:
    stores = (item for item in ast.walk(node) if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store))
    return (item.attr for item in stores if _is_of_self(item))
