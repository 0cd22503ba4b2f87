"""What each seam uses of a vLLM, found in the source of both: the list that ``record`` writes down.

A seam's code is its own file and every file of ours that it imports. Of vLLM it uses

* what it wraps: ``wrap(module.Class, "name", make)``;
* what it imports, but for annotations;
* each attribute that it reads or sets of an object of vLLM, as far as ``inference`` can tell the object's class,
  or ``Seam.types`` does;
* of the base classes of its own classes: what these override, call or read, what that calls through ``super()`` in
  turn, and the methods that call what is overridden;
* ``Seam.also``: what vLLM's own code does on our behalf.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from peagle_vllm.seams import HOOKS
from peagle_vllm.seams.ledger import HOWS, Definition, How, Seam, What
from peagle_vllm.seams.source import Source
from tools.seams.inference import Inference
from tools.seams.types import NOTHING, Class, Instance, Module, Scope

OURS = Source(Path(__file__).parents[2] / "src")
# What vLLM documents, or cannot take away without every plugin noticing.
PUBLIC = {("vllm.config.vllm", "VllmConfig"), ("vllm.logger", "init_logger")}
# How these are called matters, what they do does not: what wraps them passes everything on, or vLLM documents them.
BY_SIGNATURE = {
    "EngineArgs.create_speculative_config",
    "GPUModelRunner.sample_tokens",
    "ModelConfig.get_hidden_size",
    "ModelConfig.get_total_num_hidden_layers",
    "ModelConfig.get_vocab_size",
    "Scheduler.update_from_output",
    "SpeculativeConfig.__post_init__",
    "SpeculativeConfig.uses_dynamic_speculative_decoding",
    "VllmConfig.__post_init__",
    "VllmConfig.num_speculative_tokens",
    "async_tensor_h2d",
    "set_forward_context",
}


def uses(seam: Seam, vllm: Source) -> list[Definition]:
    """What ``seam`` uses of this vLLM, sorted; one definition once, and none inside another that is compared whole."""
    return Finder(seam, vllm).definitions()


def code_of(seam: Seam) -> dict[str, list[ast.stmt]]:
    """The seam's code, by module: its own file, and every function, class and constant of ours that it reaches."""
    own = f"peagle_vllm.seams.{seam.name.replace('-', '_')}"
    code: dict[str, list[ast.stmt]] = {own: OURS.tree(own).body}
    waiting = list(_named_in(own, code[own]))
    seen = set()
    while waiting:
        module, name = place = waiting.pop()
        if place in seen or not OURS.text(module):
            continue
        seen.add(place)
        found = [node for node in OURS.find(module, name) if isinstance(node, ast.stmt)]
        reached = [node for node in found if not isinstance(node, ast.ImportFrom)]
        if module != own:
            code.setdefault(module, []).extend(reached)
        waiting += _named_in(module, found)
    return code


def _named_in(module: str, statements: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """(module, name) of what the statements name, in their own module or by importing it."""
    for node in (node for statement in statements for node in ast.walk(statement)):
        if isinstance(node, ast.Name):
            yield module, node.id
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("peagle_vllm.seams"):
            yield from ((node.module, alias.name) for alias in node.names)


class Finder:
    """Walks through the code of one seam."""

    def __init__(self, seam: Seam, vllm: Source):
        self.seam, self.vllm = seam, vllm
        self.found: dict[tuple[str, str], How] = {}
        self.inference = Inference({"vllm": vllm, "peagle_vllm": OURS}, seam.types, self._use)
        for module, statements in code_of(seam).items():
            self._module(module, ast.Module(statements, []))
        for module, names in seam.also.items():
            for name in names:
                self._use(module, name, "called")

    def _use(self, module: str, qualname: str, how: How) -> None:
        outer = qualname.rpartition(".")[0]
        if any(is_enum(node) for node in self.vllm.find(module, outer) if outer):
            qualname = outer  # one member alone says little: a new one is met by code that lists them
        if (module, qualname) in PUBLIC or not self.vllm.find(module, qualname):
            return
        before = self.found.get((module, qualname), HOWS[-1])
        self.found[module, qualname] = min(how, before, key=HOWS.index)

    def definitions(self) -> list[Definition]:
        made = {place: Definition(*place, how, self._compared(*place, how)) for place, how in self.found.items()}
        return sorted((each for each in made.values() if not self._covered(each, made)), key=lambda each: each.key)

    def _compared(self, module: str, qualname: str, how: How) -> What:
        """All of it; of a setting, and of a class that is neither an Enum nor the base of ours, what its users see."""
        nodes = self.vllm.find(module, qualname)
        is_setting = module.startswith("vllm.config.") and all(isinstance(node, ast.AnnAssign) for node in nodes)
        is_class = all(isinstance(node, ast.ClassDef) and not is_enum(node) for node in nodes) and how != "replaced"
        return "signature" if qualname in BY_SIGNATURE or is_setting or is_class else "body"

    def _covered(self, definition: Definition, made: Mapping[tuple[str, str], Definition]) -> bool:
        """Whether others of ``made`` compare all of it: its class, or every method that sets the attribute."""
        module, outer = definition.module, definition.qualname.rpartition(".")[0]
        classes = [node for node in self.vllm.find(module, outer) if isinstance(node, ast.ClassDef)] if outer else []
        whole = {place for place, other in made.items() if other.what == "body" and other is not definition}
        if classes and (module, outer) in whole:
            return True
        nodes = self.vllm.find(module, definition.qualname)
        methods = [method for node in classes for method in Class(module, node).methods]
        setting = [method for node in nodes for method in methods if any(node is inner for inner in ast.walk(method))]
        return bool(setting) and {(module, f"{outer}.{method.name}") for method in setting} <= whole

    # ---------------------------------------------------------------------------------- our code

    def _module(self, module: str, tree: ast.Module) -> None:
        top = Scope(module, tree)
        scopes = [top, *self._scopes(top, tree)]
        functions = {scope.node.name: scope for scope in scopes if isinstance(scope.node, ast.FunctionDef)}
        for _ in range(2):  # what is passed on was passed before
            for scope in scopes:
                for node in _own_nodes(scope.node):
                    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
                        self._pass_arguments(node, scope, functions[node.func.id])
                    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "wrap":
                        self._wrap(node, scope, functions)
        for scope in scopes:
            for node in _own_nodes(scope.node):
                if isinstance(node, ast.expr):
                    self.inference.of(node, scope)
        for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            self._bases(Class(module, cls))

    def _scopes(self, outer: Scope, node: ast.AST, owner: Class | None = None) -> Iterator[Scope]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from self._scopes(outer, child, Class(outer.module, child))
            elif isinstance(child, ast.FunctionDef):
                known = dict(Scope.of_method(owner, child).known) if owner and not outer.owner else {}
                hooked = {
                    Module(module)
                    for module, names in HOOKS.items()
                    if f"{outer.module.rpartition('.')[2]}.{child.name}" in names
                }
                if hooked:
                    known = {child.args.args[0].arg: frozenset(hooked)}
                scope = Scope(outer.module, child, owner, outer, known)
                yield scope
                yield from self._scopes(scope, child, owner)
            else:
                yield from self._scopes(outer, child, owner)

    def _pass_arguments(self, call: ast.Call, scope: Scope, function: Scope) -> None:
        """Type the parameters of a function of the same file, where nothing else does, by what it is called with."""
        assert isinstance(function.node, ast.FunctionDef)
        for arg, value in zip(function.node.args.args, call.args, strict=False):
            types = self.inference.of(value, scope)
            if types and (arg.arg in function.known or not self.inference.of(ast.Name(arg.arg), function)):
                function.known[arg.arg] = function.known.get(arg.arg, NOTHING) | types

    def _wrap(self, call: ast.Call, scope: Scope, functions: Mapping[str, Scope]) -> None:
        owner, name, _ = call.args
        assert isinstance(name, ast.Constant)
        for each in self.inference.of(owner, scope):
            match each:
                case Module(module):
                    where, qualname = module, name.value
                case Class() as cls:
                    where, qualname = cls.module, f"{cls.node.name}.{name.value}"
                    wrapper = functions[name.value]
                    self_name = wrapper.node.args.args[0].arg if wrapper.node.args.args else ""
                    wrapper.known[self_name] = wrapper.known.get(self_name, NOTHING) | {Instance(cls)}
                case _:
                    continue
            if not self.vllm.find(where, qualname):
                raise LookupError(f"the seam {self.seam.name} wraps {where}.{qualname}, which this vLLM does not have")
            self._use(where, qualname, "wrapped")

    def _bases(self, cls: Class) -> None:
        above = [base for base in self.inference.above(cls) if base.module.startswith("vllm.")]
        if not above:
            return
        self._use(above[0].module, above[0].node.name, "replaced")
        scope = Scope(cls.module, cls.node)
        overridden = {method.name for method in cls.methods}
        for name in overridden | _of_self(cls.node, ast.Store):
            self.inference.member(Instance(cls, above=True), name, scope, "replaced")
        for base in above:
            for method in base.methods:
                if method.name not in overridden and overridden & _of_self(method, ast.Load):
                    self._use(base.module, f"{base.node.name}.{method.name}", "inherited")


def is_enum(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function or module, without those of functions in it, annotations and base classes."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                if not isinstance(child, ast.FunctionDef):
                    yield from _own_nodes(child)


def _of_self(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """Names of the attributes of ``self`` that are read, or set."""
    attributes = (item for item in ast.walk(node) if isinstance(item, ast.Attribute) and isinstance(item.ctx, context))
    return {item.attr for item in attributes if isinstance(item.value, ast.Name) and item.value.id == "self"}
