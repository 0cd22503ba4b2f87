"""Our code and vLLM's as jedi reads them: the definition behind a name, and the class behind an expression."""

import ast
import atexit
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import jedi
from jedi.api.classes import Name

from peagle_vllm.patches import HOOKS
from peagle_vllm.patches.ledger import Seam
from peagle_vllm.patches.source import Source

jedi.settings.dynamic_params_for_other_modules = False  # a parameter is what its own file passes
OURS = Source(Path(__file__).parents[2] / "src")
Place = tuple[str, str]  # module, qualified name
ABOVE = "_above"  # in ``Code``: an instance of a base class, on which stands what ours overrides or sets


class Tree:
    """A vLLM beside our source and nothing else: what torch's classes have is no use of vLLM."""

    def __init__(self, vllm: Source):
        self.folder = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        jedi.settings.cache_directory = self.folder / "cache"
        if isinstance(vllm.root, Path):
            (self.folder / "vllm").symlink_to(vllm.root.resolve() / "vllm")
        else:  # a wheel
            names = (name for name in vllm.root.root.namelist() if name.startswith("vllm/") and name.endswith(".py"))
            vllm.root.root.extractall(self.folder, names)
        paths = [str(self.folder), str(OURS.root)]
        self.project = jedi.Project(self.folder, sys_path=paths, smart_sys_path=False)
        self.script = cache(self._script)

    def path(self, module: str) -> Path:
        path = self.folder.joinpath(*module.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def _script(self, module: str) -> jedi.Script:
        """A module of vLLM."""
        return jedi.Script(path=self.path(module), project=self.project)


tree_of = cache(Tree)


def definitions(script: jedi.Script, node: ast.expr) -> list[Name]:
    """What an expression's last word names, in vLLM or in our code."""
    return _known(script, script.goto(node.end_lineno, node.end_col_offset - 1, follow_imports=True))


def classes(script: jedi.Script, node: ast.expr) -> list[Name]:
    """What an expression's last word can be: a class, an instance of one, or a module, of vLLM or of ours."""
    return _known(script, script.infer(node.end_lineno, node.end_col_offset - 1))


def _known(script: jedi.Script, names: Iterable[Name]) -> list[Name]:
    # An editor has one question for a script; after 300 looks into a function jedi finds nothing more in it.
    script._inference_state.inferred_element_counts.clear()
    return [name for name in names if (name.module_name or "").startswith(("vllm.", "peagle_vllm."))]


def place_of(name: Name) -> Place:
    """Where something is defined; what is set on ``self`` belongs to the class."""
    parts, parent = [name.name], name.parent()
    while parent is not None and parent.type != "module":
        parts += [parent.name] * (parent.type == "class")
        parent = parent.parent()
    return name.module_name, ".".join(reversed(parts))


class Code:
    """A module of ours, with what jedi cannot know of it written in.

    Attributes:
        tree: to walk through; its positions are those of ``script``.
        wrapped: what its calls of ``wrap`` replace.
    """

    def __init__(self, module: str, seam: Seam, vllm: Source):
        self.project, self.path = tree_of(vllm).project, tree_of(vllm).path(module)
        self.wrapped: list[Place] = []
        tree = Known(self.path.stem, seam.types).visit(ast.parse(OURS.text(module) or ""))
        more = [line for name, paths in seam.types.items() for line in _declared(f"_of_{name}", paths)]
        self._write(tree, more)
        for call in ast.walk(self.tree):
            match call:
                case ast.Call(func=ast.Name(id="wrap"), args=[ast.Attribute(value=owner, attr=name), *_]):
                    owners = [place_of(each) for each in classes(self.script, owner) if each.type == "class"]
                    modules = [each.full_name for each in classes(self.script, owner) if each.type == "module"]
                    self.wrapped += [(module, name) for module in modules]
                    self.wrapped += [(module, f"{qualname}.{name}") for module, qualname in owners]
                    more += _declared(f"_self_{name}", map(":".join, owners))
                    for made in ast.walk(tree) if owners else ():  # the function in place of the original
                        if isinstance(made, ast.FunctionDef) and made.name == name and made.args.args:
                            made.args.args[0].annotation = ast.Name(f"_self_{name}")
        self._write(tree, more)

    def _write(self, tree: ast.Module, more: list[str]) -> None:
        text = "\n".join([ast.unparse(ast.fix_missing_locations(tree)), *more])
        self.tree, self.script = ast.parse(text), jedi.Script(text, path=self.path, project=self.project)


def _declared(name: str, paths: Iterable[str]) -> list[str]:
    """Statements after which jedi takes ``name`` for any of these classes, "module:Class"."""
    pairs = (path.split(":") for path in paths)
    return [f"if _:\n    from {module} import {cls} as {name}" for module, cls in pairs]


class Known(ast.NodeTransformer):
    """What hooks are called with; the classes of the names in ``Seam.types``; ``getattr`` and ``wrap`` as attributes.

    And in a class with a base a function that names, on the base, what the class overrides or sets.
    """

    def __init__(self, file: str, types: Mapping[str, tuple[str, ...]]):
        self.file, self.types = file, types

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        for arg in node.args.args:
            if isinstance(arg.annotation, ast.Name) and arg.annotation.id in ("Any", "ModuleType", "type"):
                arg.annotation = None  # what is passed says more
        hooked = [module for module, names in HOOKS.items() if f"{self.file}.{node.name}" in names]
        lines = [f"if _:\n    import {module} as {node.args.args[0].arg}" for module in hooked]
        node.body[:0] = ast.parse("\n".join(lines)).body
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        names = {item.name for item in node.body if isinstance(item, ast.FunctionDef)} | of_self(node, ast.Store)
        for base in node.bases[:1]:
            lines = [
                f"def _(self, {ABOVE}: {ast.unparse(base)}):",
                *(f"    {ABOVE}.{name}" for name in names),
                "    pass",
            ]
            node.body += ast.parse("\n".join(lines)).body
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[value, ast.Constant(value=str(name)), *_]):
                return ast.Attribute(value, name, ast.Load())
            case ast.Call(func=ast.Name(id="wrap"), args=[owner, ast.Constant(value=str(name)), _]):
                node.args[0] = ast.Attribute(owner, name, ast.Load())
            case ast.Call(func=ast.Subscript(value=ast.Tuple(elts=[_, ast.Call()])) as typed):
                node.func = ast.Attribute(typed, "forward", ast.Load())
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._typed(node, node.id)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self._typed(self.generic_visit(node), node.attr)

    def _typed(self, node: ast.AST, name: str) -> ast.AST:
        if not self.types.get(name) or not isinstance(node.ctx, ast.Load):
            return node
        return ast.parse(f"({ast.unparse(node)}, _of_{name}())[1]", mode="eval").body


def of_self(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """Names of the attributes of ``self`` that are read, or set."""
    attributes = (item for item in ast.walk(node) if isinstance(item, ast.Attribute) and isinstance(item.ctx, context))
    return {item.attr for item in attributes if isinstance(item.value, ast.Name) and item.value.id == "self"}
