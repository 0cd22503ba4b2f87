"""What each seam uses of a vLLM, found by jedi in the source of both: the list that ``record`` writes down.

A seam's code is its own file and every function, class and constant of ours that it reaches. Of vLLM it uses

* what it wraps: ``wrap(module.Class, "name", make)``;
* what it imports, but for annotations;
* each attribute that it reads or sets of an object of vLLM, as far as jedi can tell the object's class, or
  ``Seam.types`` does;
* of the base classes of its own classes: what these override, call or read, what that calls through ``super()`` in
  turn, and the methods that call what is overridden;
* ``Seam.also``: what vLLM's own code does on our behalf.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache

from jedi.api.classes import Name

from peagle_vllm.patches.ledger import HOWS, Definition, How, Seam, What
from peagle_vllm.patches.source import Source, bound
from tools.seams.code import ABOVE, Code, Place, classes, definitions, of_self, place_of, tree_of

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


class Finder:
    """Walks through the code of one seam."""

    def __init__(self, seam: Seam, vllm: Source):
        self.vllm = vllm
        self.found: dict[Place, How] = {}
        self.reached: list[Place] = []  # of our code, in other files too
        code = cache(lambda module: Code(module, seam, vllm))
        own = code(f"peagle_vllm.patches.{seam.name.replace('-', '_')}")
        for place in own.wrapped:
            if not vllm.find(*place):
                raise LookupError(f"the seam {seam.name} wraps {'.'.join(place)}, which this vLLM does not have")
            self._use(place, "wrapped")
        self._walk(own, own.tree)
        for module, name in self.reached:  # which grows
            for node in bound(code(module).tree, name):
                self._walk(code(module), node)
        for module, names in seam.also.items():
            for name in names:
                self._use((module, name), "called")

    # ---------------------------------------------------------------------------------- our code

    def _walk(self, code: Code, tree: ast.AST) -> None:
        for node in _own_nodes(tree):
            match node:
                case ast.Name(id=name) if name.startswith("_of_"):  # a hint
                    continue
                case ast.Attribute() | ast.Name():
                    self._named(code, node)
                case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                    for each in kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]:
                        self._called(classes(code.script, each), made=False)
                case ast.Call(func=called) if not (isinstance(called, ast.Name) and called.id.startswith("_of_")):
                    self._called(classes(code.script, called), made=True)
                case ast.ClassDef(bases=[base, *_]):
                    self._base(node, next(map(place_of, definitions(code.script, base)), None))

    def _named(self, code: Code, node: ast.Attribute | ast.Name) -> None:
        names = definitions(code.script, node)
        is_set = isinstance(node.ctx, ast.Store) or ast.unparse(node).startswith(f"{ABOVE}.")
        how: How = "replaced" if is_set else "called"
        if how == "called" and isinstance(node, ast.Attribute) and not all(map(is_ours, names)):
            of_ours = any(map(is_ours, classes(code.script, node.value)))
            how = "inherited" if of_ours or ast.unparse(node.value) == "super()" else how
        for name in names:
            if is_ours(name):
                self._reach(name)
            elif name.type not in ("class", "module"):
                self._member(place_of(name), how)

    def _reach(self, name: Name) -> None:
        outer = name
        while (parent := outer.parent()) is not None and parent.type != "module":
            outer = parent
        place = name.module_name, outer.name
        if place not in self.reached and not place[0].startswith("peagle_vllm.patches") and name.type != "module":
            self.reached.append(place)

    def _called(self, names: list[Name], made: bool) -> None:
        """Classes, with what makes them where they are ``made``, and instances that are called."""
        for name in names:
            if is_ours(name) or name.type not in ("class", "instance"):
                continue
            if name.type == "class":
                self._use(place_of(name), "called")
            method = "__init__" if name.type == "class" else "forward"
            places = ((module, f"{cls}.{method}") for module, cls in (place_of(name), *self.above(place_of(name))))
            if made and (owner := next((place for place in places if self.vllm.find(*place)), None)):
                self._member(owner, "called")

    def _member(self, place: Place, how: How) -> None:
        """Something, and the methods that it calls through ``super()``."""
        if not self._use(place, how):
            return
        module, name = place[0], place[1].rpartition(".")[2]
        for node in (inner for outer in self.vllm.find(*place) for inner in ast.walk(outer)):
            match node:
                case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=called) if called == name:
                    for each in definitions(tree_of(self.vllm).script(module), node):
                        self._member(place_of(each), "inherited")

    def _base(self, cls: ast.ClassDef, base: Place | None) -> None:
        """The base of a class of ours, and the methods of it that call what is overridden."""
        overridden = {item.name for item in cls.body if isinstance(item, ast.FunctionDef)}
        if base is None or not base[0].startswith("vllm."):
            return
        self._use(base, "replaced")
        for module, qualname in (base, *self.above(base)):
            for method in (item for node in self.vllm.find(module, qualname) for item in ast.iter_child_nodes(node)):
                is_other = isinstance(method, ast.FunctionDef) and method.name not in overridden
                if is_other and overridden & of_self(method, ast.Load):
                    self._use((module, f"{qualname}.{method.name}"), "inherited")

    def above(self, cls: Place) -> Iterator[Place]:
        """The base classes in vLLM, nearest first."""
        for base in (base for node in self.vllm.find(*cls) for base in getattr(node, "bases", ())):
            plain = base.value if isinstance(base, ast.Subscript) else base
            for place in map(place_of, definitions(tree_of(self.vllm).script(cls[0]), plain)):
                yield from (place, *self.above(place))

    # ------------------------------------------------------------------------------ what was found

    def _use(self, place: Place, how: How) -> bool:
        """Note a use of what this vLLM has; whether it is new."""
        module, qualname = place
        outer = qualname.rpartition(".")[0]
        if any(is_enum(node) for node in self.vllm.find(module, outer) if outer):
            qualname = outer  # one member alone says little: a new one is met by code that lists them
        if (module, qualname) in PUBLIC or not self.vllm.find(module, qualname):
            return False
        before = self.found.get((module, qualname))
        self.found[module, qualname] = min(how, before or how, key=HOWS.index)
        return before is None

    def definitions(self) -> list[Definition]:
        made = {place: Definition(*place, how, self._compared(*place, how)) for place, how in self.found.items()}
        return sorted((each for each in made.values() if not self._covered(each, made)), key=lambda each: each.key)

    def _compared(self, module: str, qualname: str, how: How) -> What:
        """All of it; of a setting, and of a class that is neither an Enum nor the base of ours, what its users see."""
        nodes = self.vllm.find(module, qualname)
        is_setting = module.startswith("vllm.config.") and all(isinstance(node, ast.AnnAssign) for node in nodes)
        is_class = all(isinstance(node, ast.ClassDef) and not is_enum(node) for node in nodes) and how != "replaced"
        return "signature" if qualname in BY_SIGNATURE or is_setting or is_class else "body"

    def _covered(self, definition: Definition, made: Mapping[Place, Definition]) -> bool:
        """Whether others of ``made`` compare all of it: its class, or every method that sets the attribute."""
        module, outer = definition.module, definition.qualname.rpartition(".")[0]
        classes = [node for node in self.vllm.find(module, outer) if isinstance(node, ast.ClassDef)] if outer else []
        whole = {place for place, other in made.items() if other.what == "body" and other is not definition}
        if classes and (module, outer) in whole:
            return True
        nodes = self.vllm.find(module, definition.qualname)
        methods = [item for node in classes for item in node.body if isinstance(item, ast.FunctionDef)]
        setting = [each for node in nodes for each in methods if each.lineno <= node.lineno <= (each.end_lineno or 0)]
        return bool(setting) and {(module, f"{outer}.{method.name}") for method in setting} <= whole


def is_ours(name: Name) -> bool:
    return name.module_name.startswith("peagle_vllm.")


def is_enum(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes, ``node`` among them, without annotations."""
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _own_nodes(child)
