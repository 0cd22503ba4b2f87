"""Which class of vLLM an expression of ours is of, as far as annotations and assignments tell.

Reads the source text of both sides and imports neither. An expression has a set of types, which is empty where
the source does not tell.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from peagle_vllm.seams.source import Source

SAME = {"copy", "replace", "list", "tuple", "set", "sorted", "iter"}  # calls whose result is typed as their argument
ELEMENT = {"next", "min", "max", "get", "pop"}
WRAPPERS = {"Optional", "Annotated", "ClassVar", "Final", "SkipValidation"}


@dataclass(frozen=True)
class Module:
    name: str


@dataclass(frozen=True)
class Class:
    module: str
    node: ast.ClassDef

    @property
    def methods(self) -> "list[ast.FunctionDef]":
        return [item for item in self.node.body if isinstance(item, ast.FunctionDef)]


@dataclass(frozen=True)
class Instance:
    of: Class
    above: bool = False  # super(): members are looked up from the class above on


@dataclass(frozen=True)
class Function:
    module: str
    node: ast.FunctionDef


@dataclass(frozen=True)
class Many:
    """A list, a tuple, an iterator, or the values of a dict."""

    of: "Types"


Types = frozenset[Module | Class | Instance | Function | Many]
NOTHING: Types = frozenset()


@dataclass(frozen=True, eq=False)
class Scope:
    """A function or a module, and what is known of names beside their annotations."""

    module: str
    node: ast.AST
    owner: Class | None = None  # the class of a method
    outer: "Scope | None" = None
    known: dict[str, Types] = field(default_factory=dict)


class Inference:
    """Types of expressions.

    Args:
        sources: the source of a module by the first part of its name: vllm, and ours.
        hints: types of names that no annotation tells.
        used: is called with (module, qualname, how) of each definition of vLLM that an expression of ours uses.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        hints: Mapping[str, tuple[str, ...]],
        used: Callable[[str, str, str], None],
    ):
        self.sources, self.hints, self.used = sources, hints, used
        self._busy: set[tuple[int, str]] = set()
        self._set: dict[tuple[int, str], Types] = {}
        self.definition, self.named = cache(self._definition), cache(self._named)
        self.owners = cache(self._owners)

    def source(self, module: str) -> Source | None:
        return self.sources.get(module.partition(".")[0])

    # ------------------------------------------------------------------------------- definitions

    def _definition(self, module: str, name: str) -> tuple[str, list[ast.AST]]:
        """The module that defines what ``from module import name`` gives, and the definitions."""
        source = self.source(module)
        nodes = source.find(module, name) if source else []
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                origin = _origin(node, module, source.is_package(module) if source else False)
                real = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
                return self.definition(origin, real)
        return module, nodes

    def _named(self, module: str, name: str) -> Types:
        """The types of a module's name."""
        where, nodes = self.definition(module, name)
        return frozenset().union(*(self._type_of(where, node, name) for node in nodes))

    def _type_of(self, module: str, node: ast.AST, name: str, owner: Class | None = None) -> Types:
        match node:
            case ast.ClassDef():
                return frozenset({Class(module, node)})
            case ast.FunctionDef():
                if owner and any("property" in ast.unparse(each) for each in node.decorator_list):
                    return self.annotated(module, node.returns)
                return frozenset({Function(module, node)})
            case ast.AnnAssign():
                return self.annotated(module, node.annotation)
            case ast.Assign() if owner and _is_enum(owner):
                return frozenset({Instance(owner)})
        return NOTHING

    def annotated(self, module: str, note: ast.expr | None) -> Types:
        """The types of something with this annotation."""
        match note:
            case ast.Constant(value=str(text)):
                return self.annotated(module, ast.parse(text, mode="eval").body)
            case ast.BinOp(left=left, right=right):
                return self.annotated(module, left) | self.annotated(module, right)
            case ast.Name(id=name):
                return frozenset(Instance(each) for each in self.named(module, name) if isinstance(each, Class))
            case ast.Subscript(value=ast.Name(id=kind), slice=inner):
                parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
                if kind == "type":
                    return frozenset(each.of for each in self.annotated(module, inner) if isinstance(each, Instance))
                if kind in WRAPPERS:
                    return self.annotated(module, parts[0])
                if kind not in ("Literal", "Callable"):
                    return frozenset({Many(frozenset().union(*(self.annotated(module, part) for part in parts)))})
        return NOTHING

    def above(self, cls: Class) -> Iterator[Class]:
        """The base classes whose source is known, nearest first."""
        for base in cls.node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(base, ast.Name):
                for found in self.named(cls.module, base.id):
                    if isinstance(found, Class):
                        yield found
                        yield from self.above(found)

    def _owners(self, of: Instance | Class, name: str) -> list[Class]:
        """The classes that bind ``name`` or set it on ``self``, nearest first."""
        cls = of.of if isinstance(of, Instance) else of
        start = [] if isinstance(of, Instance) and of.above else [cls]
        known = ((each, self.source(each.module)) for each in (*start, *self.above(cls)))
        return [each for each, source in known if source and source.find(each.module, f"{each.node.name}.{name}")]

    # ------------------------------------------------------------------------------- expressions

    def of(self, node: ast.AST | None, scope: Scope) -> Types:
        """The types of an expression; what it uses of vLLM is reported on the way."""
        match node:
            case ast.Name(id=name):
                return self._name(name, scope) or self._hinted(name)
            case ast.Attribute(value=value, attr=name, ctx=context):
                how = "replaced" if isinstance(context, ast.Store) else "called"
                return self._attribute(self.of(value, scope), name, scope, how)
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[value, ast.Constant(value=str(name)), *_]):
                return self._attribute(self.of(value, scope), name, scope, "called")
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                for each in self.of(kinds, scope):
                    if isinstance(each, Class):
                        self._report(scope, each.module, each.node.name, "called")
            case ast.Call(func=ast.Name(id="super")):
                owner = _method_owner(scope)
                return frozenset({Instance(owner, above=True)}) if owner else NOTHING
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[value, *_]) if (
                name in SAME | ELEMENT
            ):
                inner = self.of(value, scope)
                return _elements(inner) if name in ELEMENT else inner
            case ast.Call(func=called):
                return self._result(self.of(called, scope), scope)
            case ast.Subscript(value=value, slice=index):
                inner = self.of(value, scope)
                return inner if isinstance(index, ast.Slice) else _elements(inner)
            case ast.GeneratorExp(elt=element) | ast.ListComp(elt=element) | ast.DictComp(value=element):
                return frozenset({Many(self.of(element, scope))})
            case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Dict(values=parts):
                return frozenset({Many(self._any_of(parts, scope))})
            case ast.BoolOp(values=parts):
                return self._any_of(parts, scope)
            case ast.IfExp(body=one, orelse=other):
                return self._any_of([one, other], scope)
            case ast.NamedExpr(value=value) | ast.Starred(value=value):
                return self.of(value, scope)
        return NOTHING

    def _any_of(self, nodes: list, scope: Scope) -> Types:
        return frozenset().union(*(self.of(node, scope) for node in nodes))

    def _hinted(self, name: str) -> Types:
        classes = (self.named(*path.split(":")) for path in self.hints.get(name, ()))
        return frozenset(Instance(each) for found in classes for each in found if isinstance(each, Class))

    def _name(self, name: str, scope: Scope) -> Types:
        if (id(scope.node), name) in self._busy:
            return NOTHING
        self._busy.add((id(scope.node), name))
        try:
            within: Scope | None = scope
            while within and isinstance(within.node, ast.FunctionDef):
                bindings = _bindings(within.node)
                if name in within.known:
                    return within.known[name]
                if name in bindings:
                    return frozenset().union(*(self._binding(how, node, name, within) for how, node in bindings[name]))
                within = within.outer
        finally:
            self._busy.discard((id(scope.node), name))
        source = self.source(scope.module)
        for node in source.find(scope.module, name) if source else ():
            if isinstance(node, ast.ImportFrom):
                return self._imported(node, name, scope)
        return self.named(scope.module, name)

    def _imported(self, node: ast.ImportFrom, name: str, scope: Scope) -> Types:
        """A class is reported where it is called or looked for, anything else where it is named."""
        source = self.source(scope.module)
        origin = _origin(node, scope.module, bool(source and source.is_package(scope.module)))
        real = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        types = self.named(origin, real)
        if not any(isinstance(each, Class) for each in types):
            self._report(scope, self.definition(origin, real)[0], real, "called")
        return types

    def _binding(self, how: str, node: ast.AST, name: str, scope: Scope) -> Types:
        if how == "function":
            assert isinstance(node, ast.FunctionDef)
            return frozenset({Function(scope.module, node)})
        if how == "annotation":
            assert isinstance(node, ast.expr)
            return self.annotated(scope.module, node)
        if how == "isinstance":
            return frozenset(Instance(each) for each in self.of(node, scope) if isinstance(each, Class))
        if how == "import":
            assert isinstance(node, ast.ImportFrom)
            return self._imported(node, name, scope)
        types = self.of(node, scope)
        return _elements(types) if how == "element" else types

    def _attribute(self, types: Types, name: str, scope: Scope, how: str) -> Types:
        found: Types = NOTHING
        for each in types:
            match each:
                case Module(module):
                    types = self.named(module, name)
                    if not any(isinstance(each, Class) for each in types):
                        self._report(scope, module, name, how)
                    found |= types
                case Many():
                    found |= _elements(frozenset({each})) if name in ELEMENT else {each}
                case Class() | Instance():
                    found |= self.member(each, name, scope, how)
        return found or self._hinted(name)

    def member(self, of: Class | Instance, name: str, scope: Scope, how: str = "called") -> Types:
        """The types of a member, which is reported, with those that it calls through ``super()``."""
        owners = self.owners(of, name)
        if not owners:
            return NOTHING
        is_ours = not (of.of if isinstance(of, Instance) else of).module.startswith("vllm.")
        how = "inherited" if is_ours and how == "called" else how
        for owner in owners:
            if owner.module.startswith("vllm."):
                self._report(scope, owner.module, f"{owner.node.name}.{name}", how)
                how = "inherited"  # the one above is replaced by this one, not by ours
                if not any(method.name == name and _calls_super(method, name) for method in owner.methods):
                    break
        first, source = owners[0], self.source(owners[0].module)
        assert source is not None
        types: Types = NOTHING
        for node in source.find(first.module, f"{first.node.name}.{name}"):
            types |= self._type_of(first.module, node, name, first) or self._assigned(first, node, name)
        return types

    def _assigned(self, owner: Class, node: ast.AST, name: str) -> Types:
        """The types of ``self.name = value`` in a method."""
        if (id(node), name) not in self._set and isinstance(node, ast.Assign):
            self._set[id(node), name] = NOTHING  # while it is looked for
            for method in owner.methods:
                if any(node is inner for inner in ast.walk(method)):
                    inside = Scope(owner.module, method, owner, known=self.of_self(owner, method))
                    for target, value in _pairs(node):
                        if isinstance(target, ast.Attribute) and target.attr == name:
                            self._set[id(node), name] = self.of(value, inside)
        return self._set.get((id(node), name), NOTHING)

    @staticmethod
    def of_self(owner: Class, method: ast.FunctionDef) -> dict[str, Types]:
        return {method.args.args[0].arg: frozenset({Instance(owner)})} if method.args.args else {}

    def _result(self, types: Types, scope: Scope) -> Types:
        found: Types = NOTHING
        for each in types:
            match each:
                case Class(module, node):
                    self._report(scope, module, node.name, "called")
                    self.member(each, "__init__", scope)
                    found |= {Instance(each)}
                case Function(module, node):
                    found |= self.annotated(module, node.returns)
                case Instance():
                    found |= self._result(self.member(each, "forward", scope), scope)
                case Many():
                    found |= {each}
        return found

    def _report(self, scope: Scope, module: str, qualname: str, how: str) -> None:
        if module.startswith("vllm.") and not scope.module.startswith("vllm."):
            self.used(module, qualname, how)


def _origin(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The module that an import statement of ``module`` names."""
    if not node.level:
        return node.module or ""
    package = module if is_package else module.rpartition(".")[0]
    for _ in range(node.level - 1):
        package = package.rpartition(".")[0]
    return f"{package}.{node.module}" if node.module else package


def _pairs(assignment: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """``a, b = x, y`` as (a, x), (b, y)."""
    target, value = assignment.targets[0], assignment.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return zip(target.elts, value.elts, strict=False)
    return iter([(target, value)])


def _is_enum(cls: Class) -> bool:
    return any("Enum" in ast.unparse(base) for base in cls.node.bases)


def _calls_super(method: ast.FunctionDef, name: str) -> bool:
    return f"super().{name}(" in ast.unparse(method)


def _method_owner(scope: Scope | None) -> Class | None:
    while scope and not scope.owner:
        scope = scope.outer
    return scope.owner if scope else None


def _elements(types: Types) -> Types:
    return frozenset().union(*(each.of for each in types if isinstance(each, Many)))


@cache
def _bindings(function: ast.FunctionDef) -> dict[str, list[tuple[str, ast.AST]]]:
    """What binds each name in a function: (how, expression). Names of comprehensions count as the function's."""
    bound: dict[str, list[tuple[str, ast.AST]]] = {}

    def bind(target: ast.expr, how: str, value: ast.AST) -> None:
        match target, value:
            case ast.Name(id=name), _:
                bound.setdefault(name, []).append((how, value))
            case (ast.Tuple(elts=names), ast.Tuple(elts=values)) if how == "value" and len(names) == len(values):
                for each, own in zip(names, values, strict=True):
                    bind(each, how, own)
            case ast.Tuple(elts=names), _:
                for each in names:
                    bind(each, "element", value)

    for arg in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
        bound[arg.arg] = [("annotation", arg.annotation)] if arg.annotation else []
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[target], value=value) | ast.NamedExpr(target=target, value=value):
                bind(target, "value", value)
            case ast.AnnAssign(target=ast.Name() as target, annotation=note):
                bind(target, "annotation", note)
            case ast.For(target=target, iter=values) | ast.comprehension(target=target, iter=values):
                bind(target, "element", values)
            case ast.ImportFrom(names=aliases):
                bound |= {alias.asname or alias.name: [("import", node)] for alias in aliases}
            case ast.FunctionDef(name=name) if node is not function:
                bound.setdefault(name, []).append(("function", node))
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name() as target, kind]):
                bind(target, "isinstance", kind)
    return bound
