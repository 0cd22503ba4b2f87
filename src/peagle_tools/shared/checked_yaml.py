"""A YAML file read into a pydantic model: every key checked, each mistake a line with its place."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from peagle_tools.shared.errors import ToolError
from peagle_vllm.heads.files import one_line


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Model = TypeVar("Model", bound=Strict)
MESSAGES = {"extra_forbidden": "unknown key", "missing": "is missing", "model_type": "is no mapping of keys to values"}


def read_yaml(file: Path, model: type[Model], what: str) -> Model:
    """Read ``file``, ``what`` it is, into ``model``; its folder is the context of the validation.

    ToolError has a line for each mistake, ``FILE:LINE: KEY: what is wrong``.
    """
    try:
        loader = _Loader(file.read_bytes())
        root = loader.get_single_node()
        data = loader.construct_document(root) if root else None
    except OSError as error:
        raise ToolError(f"{file}: cannot be read ({error.strerror})") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        no_yaml = "" if isinstance(error, yaml.constructor.ConstructorError) else "no YAML: "
        raise ToolError(f"{file}:{line}: {no_yaml}{error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a control character; no such date; too deep
        raise ToolError(f"{file}: no YAML: {one_line(error)}") from None
    if not isinstance(data, dict):
        raise ToolError(f"{file}:1: a {what} is a mapping of keys to values")
    try:
        return model.model_validate(data, context=file.parent)
    except ValidationError as error:
        mistakes = sorted(_mistake(root, what, item) for item in error.errors())
        raise ToolError("\n".join(f"{file}:{line}: {text}" for line, text in mistakes)) from None


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice; YAML itself would take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):  # YAML itself refuses others
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value}: is there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _mistake(root: yaml.Node, what: str, item: Any) -> tuple[int, str]:
    """One of pydantic's errors as (line, ``KEY: what is wrong``)."""
    path = [part for part in item["loc"] if part != "[key]"]
    message = MESSAGES.get(item["type"], item["msg"].removeprefix("Value error, "))
    if item["type"] == "string_type" and isinstance(item["input"], bool | int | float):
        message = f"is {item['input']!r}; write it in quotes"
    return _line(root, path), f"{'.'.join(map(str, path)) or what}: {message}"


def _line(node: yaml.Node, path: Sequence[str | int]) -> int:
    """The line of ``path``, or of the nearest key around it: a missing key has no line of its own."""
    line = 0
    for part in path:
        if isinstance(node, yaml.MappingNode):
            here = next((pair for pair in node.value if pair[0].value == str(part)), None)
        else:
            items = node.value[int(part) :] if isinstance(node, yaml.SequenceNode) else ()  # a pair can lack its second
            here = (items[0], items[0]) if items else None
        if here is None:
            break
        key, node = here
        line = key.start_mark.line
    return line + 1
