"""Which class of vLLM an expression of ours is of, as far as annotations and assignments tell.

Reads the source text of both sides and imports neither. An expression has a set of types, which is empty where the
source does not tell. A list, an iterator or a dict of something is typed as that something, and so is what an unknown
function makes of it: what matters is whose attributes are read in the end.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache

from peagle_vllm.seams.source import Source
from tools.seams.types import NOTHING, Class, Function, Instance, Module, Scope, Types, bindings_of, pairs


class Inference:
    """Types of expressions.

    Args:
        sources: where the source of a module is, by the first part of its name.
        hints: types of names that nothing tells, or not rightly: name -> "module:Class".
        used: is called with (module, qualname, how) of each definition of vLLM that an expression of ours uses.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        hints: Mapping[str, tuple[str, ...]],
        used: Callable[[str, str, str], None],
    ):
        self.sources, self.hints, self.used = sources, hints, used
        self._looked_for: dict[tuple[int, str], Types] = {}  # nothing while it is being found
        self.definition, self.owners = cache(self._definition), cache(self._owners)

    def find(self, module: str, qualname: str) -> list[ast.AST]:
        source = self.sources.get(module.partition(".")[0])
        return source.find(module, qualname) if source else []

    def _definition(self, module: str, name: str) -> tuple[str, str]:
        """The module and name under which something is defined that ``module`` has under ``name``."""
        for node in self.find(module, name):
            if isinstance(node, ast.ImportFrom):
                return self.imported(module, node, name)
        return module, name

    def imported(self, module: str, node: ast.ImportFrom, name: str) -> tuple[str, str]:
        """The same of a name that an import statement in ``module`` binds."""
        real = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        parts = module.split(".")
        if node.level:
            up = node.level - self.sources[parts[0]].is_package(module)
            parts = [*parts[: len(parts) - up], *(node.module or "").split(".")]
            return self.definition(".".join(filter(None, parts)), real)
        return self.definition(node.module or "", real)

    def named(self, module: str, name: str) -> Types:
        """The types of a module's name."""
        where, real = self.definition(module, name)
        return _union(self._type_of(where, node) for node in self.find(where, real))

    def _type_of(self, module: str, node: ast.AST) -> Types:
        match node:
            case ast.ClassDef():
                return frozenset({Class(module, node)})
            case ast.FunctionDef(decorator_list=[*decorators], returns=result):
                is_property = any("property" in ast.unparse(each) for each in decorators)
                return self.annotated(module, result) if is_property else frozenset({Function(module, node)})
            case ast.AnnAssign(annotation=annotation):
                return self.annotated(module, annotation)
        return NOTHING

    def annotated(self, module: str, annotation: ast.AST | None) -> Types:
        """The types of something with this annotation, or of what it contains."""
        match annotation:
            case ast.Constant(value=str(text)):
                return self.annotated(module, ast.parse(text, mode="eval").body)
            case ast.Name(id=name):
                return frozenset(Instance(each) for each in self.named(module, name) if isinstance(each, Class))
            case ast.BinOp() | ast.Tuple():
                return _union(self.annotated(module, part) for part in ast.iter_child_nodes(annotation))
            case ast.Subscript(value=ast.Name(id=kind), slice=inner) if kind not in ("Callable", "Literal"):
                return self.annotated(module, inner)
        return NOTHING

    def above(self, cls: Class) -> Iterator[Class]:
        """The base classes whose source is known, nearest first."""
        for base in cls.node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            for found in self.named(cls.module, base.id) if isinstance(base, ast.Name) else ():
                if isinstance(found, Class):
                    yield found
                    yield from self.above(found)

    def _owners(self, of: Class | Instance, name: str) -> list[Class]:
        """The classes that bind ``name`` or set it on ``self``, nearest first."""
        cls = of.of if isinstance(of, Instance) else of
        classes = [*self.above(cls)] if isinstance(of, Instance) and of.above else [cls, *self.above(cls)]
        return [each for each in classes if self.find(each.module, f"{each.node.name}.{name}")]

    # ------------------------------------------------------------------------------- expressions

    def of(self, node: ast.AST, scope: Scope) -> Types:
        """The types of an expression; what it uses of vLLM is reported on the way."""
        match node:
            case ast.Name(id=name):
                return self._hinted(name) or self._name(name, scope)
            case ast.Attribute(value=value, attr=name, ctx=context):
                how = "replaced" if isinstance(context, ast.Store) else "called"
                return self._attribute(self.of(value, scope), name, scope, how)
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[value, ast.Constant(value=str(name)), *_]):
                return self._attribute(self.of(value, scope), name, scope)
            case ast.Call(func=ast.Name(id="super")) if scope.owner:
                return frozenset({Instance(scope.owner, above=True)})
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                for each in self.of(kinds, scope):
                    if isinstance(each, Class):
                        self._report(scope, each.module, each.node.name)
            case ast.Call(func=ast.Attribute(value=value, attr="values" | "items")):
                return self.of(value, scope)
            case ast.Call(func=called, args=arguments):
                found = self.of(called, scope)
                return self._result(found, scope) if found else _union(self.of(each, scope) for each in arguments[:1])
            case ast.GeneratorExp(elt=value) | ast.ListComp(elt=value) | ast.DictComp(value=value):
                return self.of(value, scope)
            case ast.Subscript(value=value) | ast.NamedExpr(value=value) | ast.Starred(value=value):
                return self.of(value, scope)
            case ast.BoolOp(values=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts):
                return _union(self.of(part, scope) for part in parts)
            case ast.IfExp(body=one, orelse=other):
                return self.of(one, scope) | self.of(other, scope)
        return NOTHING

    def _hinted(self, name: str) -> Types:
        classes = _union(self.named(*path.split(":")) for path in self.hints.get(name, ()))
        return frozenset(Instance(each) for each in classes if isinstance(each, Class))

    def _name(self, name: str, scope: Scope) -> Types:
        within: Scope | None = scope
        while within and isinstance(within.node, ast.FunctionDef):
            if name in within.known:
                return within.known[name]
            bindings = bindings_of(within.node)
            if name in bindings:
                return self._once((id(within.node), name), bindings[name], within)
            within = within.outer
        imports = [node for node in self.find(scope.module, name) if isinstance(node, ast.ImportFrom)]
        return _union(self._import(node, name, scope) for node in imports) or self.named(scope.module, name)

    def _once(self, place: tuple[int, str], bindings: Iterable[tuple[str, ast.AST]], scope: Scope) -> Types:
        """The types of a name or attribute that several bindings give it, one of which may read it."""
        if place in self._looked_for:
            return self._looked_for[place]
        self._looked_for[place] = NOTHING
        found = _union(self._binding(how, node, place[1], scope) for how, node in bindings)
        del self._looked_for[place]
        return found

    def _binding(self, how: str, node: ast.AST, name: str, scope: Scope) -> Types:
        match how, node:
            case "annotation", _:
                return self.annotated(scope.module, node)
            case "isinstance", _:
                return frozenset(Instance(each) for each in self.of(node, scope) if isinstance(each, Class))
            case "statement", ast.ImportFrom():
                return self._import(node, name, scope)
            case "statement", ast.FunctionDef():
                return frozenset({Function(scope.module, node)})
        return self.of(node, scope)

    def _import(self, node: ast.ImportFrom, name: str, scope: Scope) -> Types:
        """A class is reported where it is called or looked for, anything else where it is named."""
        where, real = self.imported(scope.module, node, name)
        types = self.named(where, real)
        if not any(isinstance(each, Class) for each in types):
            self._report(scope, where, real)
        return types

    def _attribute(self, types: Types, name: str, scope: Scope, how: str = "called") -> Types:
        found: Types = NOTHING
        for each in types:
            if isinstance(each, Module):
                own = self.named(each.name, name)
                if not any(isinstance(one, Class) for one in own):
                    self._report(scope, each.name, name, how)
                found |= own
            elif isinstance(each, Class | Instance):
                found |= self.member(each, name, scope, how)
        return found or self._hinted(name)

    def member(self, of: Class | Instance, name: str, scope: Scope, how: str = "called") -> Types:
        """The types of a member, which is reported, with those that it calls through ``super()``."""
        owners = self.owners(of, name)
        if not (of.of if isinstance(of, Instance) else of).module.startswith("vllm.") and how == "called":
            how = "inherited"
        for owner in owners:
            if owner.module.startswith("vllm."):
                self._report(scope, owner.module, f"{owner.node.name}.{name}", how)
                how = "inherited"  # the one above is replaced by this one, not by ours
            if not any(each.name == name and f"super().{name}(" in ast.unparse(each) for each in owner.methods):
                break
        found: Types = NOTHING
        for owner in owners[:1]:
            for node in self.find(owner.module, f"{owner.node.name}.{name}"):
                found |= self._type_of(owner.module, node) or self._assigned(owner, node, name)
        return found

    def _assigned(self, owner: Class, node: ast.AST, name: str) -> Types:
        """The types of ``self.name = value`` in a method."""
        method = next((each for each in owner.methods if any(node is inner for inner in ast.walk(each))), None)
        if method is None or not isinstance(node, ast.Assign):
            return NOTHING
        values = [("value", value) for target, value in pairs(node.targets[0], node.value) if _attr(target) == name]
        return self._once((id(node), name), values, Scope.of_method(owner, method))

    def _result(self, types: Types, scope: Scope) -> Types:
        found: Types = NOTHING
        for each in types:
            match each:
                case Class(module, node):
                    self._report(scope, module, node.name)
                    self.member(each, "__init__", scope)
                    found |= {Instance(each)}
                case Function(module, node):
                    found |= self.annotated(module, node.returns)
                case Instance():
                    found |= self._result(self.member(each, "forward", scope), scope)
        return found

    def _report(self, scope: Scope, module: str, qualname: str, how: str = "called") -> None:
        if module.startswith("vllm.") and not scope.module.startswith("vllm."):
            self.used(module, qualname, how)


def _union(parts: Iterable[Types]) -> Types:
    return frozenset().union(*parts)


def _attr(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ""
