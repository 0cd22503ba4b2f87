"""What an expression can be, and what binds the names in a function."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache


@dataclass(frozen=True)
class Module:
    name: str


@dataclass(frozen=True)
class Class:
    module: str
    node: ast.ClassDef

    @property
    def methods(self) -> list[ast.FunctionDef]:
        return [item for item in self.node.body if isinstance(item, ast.FunctionDef)]


@dataclass(frozen=True)
class Instance:
    of: Class
    above: bool = False  # super(): members are looked up from the class above on


@dataclass(frozen=True)
class Function:
    module: str
    node: ast.FunctionDef


Type = Module | Class | Instance | Function
Types = frozenset[Type]
NOTHING: Types = frozenset()


@dataclass(frozen=True, eq=False)
class Scope:
    """A function or a module, the class that it is in, and types of names that nothing in it tells."""

    module: str
    node: ast.AST
    owner: Class | None = None
    outer: "Scope | None" = None
    known: dict[str, Types] = field(default_factory=dict)

    @classmethod
    def of_method(cls, owner: Class, method: ast.FunctionDef, outer: "Scope | None" = None) -> "Scope":
        known = {arg.arg: frozenset({Instance(owner)}) for arg in method.args.args[:1]}
        return cls(owner.module, method, owner, outer, known)


def pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """``a, b = x, y`` as (a, x), (b, y), and ``a, b = x`` as (a, x), (b, x)."""
    if not isinstance(target, ast.Tuple):
        yield target, value
    elif isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield from ((each, value) for each in target.elts)


@cache
def bindings_of(function: ast.FunctionDef) -> dict[str, list[tuple[str, ast.AST]]]:
    """What binds each name in a function: (how, node). Names of comprehensions count as the function's."""
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    bound = {arg.arg: [("annotation", arg.annotation)] if arg.annotation else [] for arg in arguments}
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[target], value=value) | ast.NamedExpr(target=target, value=value):
                new = [(each, "value", own) for each, own in pairs(target, value)]
            case ast.For(target=target, iter=values) | ast.comprehension(target=target, iter=values):
                new = [(each, "value", own) for each, own in pairs(target, values)]
            case ast.AnnAssign(target=target, annotation=annotation):
                new = [(target, "annotation", annotation)]
            case ast.Call(func=ast.Name(id="isinstance"), args=[target, kind]):
                new = [(target, "isinstance", kind)]
            case ast.ImportFrom(names=aliases):
                new = [(ast.Name(alias.asname or alias.name), "statement", node) for alias in aliases]
            case ast.FunctionDef(name=name) if node is not function:
                new = [(ast.Name(name), "statement", node)]
            case _:
                continue
        for target, how, value in new:
            if isinstance(target, ast.Name):
                bound.setdefault(target.id, []).append((how, value))
    return bound
