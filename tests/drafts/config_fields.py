"""Every field that vLLM or transformers reads of a head's config, and values that a stranger's config may have there.

The fields come from their code: those that are read while a head is loaded, those that the source of its classes
names, and those whose types transformers checks.
"""

import ast
import copy
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any
from unittest.mock import patch

from tests.support.dialects import BESIDE_LAYERS, Written

MODELS = "vllm.model_executor.models"
SOURCES = (
    *(f"{MODELS}.{name}" for name in ("llama", "llama_eagle3", "qwen2", "qwen3", "qwen3_eagle3")),
    "vllm.model_executor.layers.rotary_embedding",
    "vllm.transformers_utils.configs.speculators.algos",
    "vllm.v1.worker.gpu.spec_decode.utils",
)
CONFIGS = {"config", "self.config", "hf_config", "config_dict", "pre_trained_config"}
INNER = {"rope_parameters", "eagle_config", "dflash_config"}  # objects in a config
MISSING = object()


@contextmanager
def recording(names: set[str]) -> Iterator[None]:
    """Note every attribute of a config that vLLM reads meanwhile."""
    from transformers import PreTrainedConfig

    original = PreTrainedConfig.__getattribute__

    def getattribute(self: Any, name: str) -> Any:
        is_field = not name.startswith("_") and not callable(getattr(type(self), name, None))
        if is_field and "/vllm/" in sys._getframe(1).f_code.co_filename:
            names.add(name)
        return original(self, name)

    with patch.object(PreTrainedConfig, "__getattribute__", getattribute):
        yield


def named_in_source() -> set[str]:
    """Fields by the names that the source asks a config for; those of an inner object with its name and a dot."""
    names = set()
    for module in SOURCES:
        for node in ast.walk(ast.parse(inspect.getsource(importlib.import_module(module)))):
            match node:
                case ast.Call(ast.Name("getattr" | "hasattr"), [config, ast.Constant(str(name)), *_]):
                    pass
                case ast.Call(ast.Attribute(config, "get"), [ast.Constant(str(name)), *_]):
                    pass
                case ast.Subscript(config, ast.Constant(str(name))) | ast.Compare(ast.Constant(str(name)), _, [config]):
                    pass
                case ast.Attribute(config, name) if ast.unparse(config) in CONFIGS:
                    pass
                case ast.Compare(ast.Name("k"), [ast.In()], [ast.Tuple(elements)]) if module.endswith("embedding"):
                    names |= {f"rope_parameters.{element.value}" for element in elements}
                    continue
                case _:
                    continue
            names |= {name} if ast.unparse(config) in CONFIGS else set()
            names |= {f"{ast.unparse(config)}.{name}"} if ast.unparse(config) in INNER else set()
    return {name for name in names if not name.startswith("_")}


def checked_by_transformers() -> set[str]:
    from transformers import LlamaConfig, Qwen3Config

    return {field.name for config in (LlamaConfig, Qwen3Config) for field in fields(config)}


# One object for each type of rotary embedding, whose fields are changed in it.
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic with alpha": {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    "ntk": {"rope_type": "ntk", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32},
}
KNOWN = {  # values of fields that the tests' heads do not state
    "dtype": "float32",
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": 8,
    "logit_scale": 2.0,
    "partial_rotary_factor": 0.5,
    "quantization_config": {"quant_method": "fp8"},
    "sub_configs": {},
}


@dataclass(frozen=True)
class Case:
    """One value of one field."""

    field: str
    label: str
    value: Any
    rope: str = ""  # the type of rotary embedding that the head has for it

    def apply(self, head: Written) -> None:
        *inner, name = self.field.split(".")
        layers = head.layer_config
        if self.rope:
            layers["rope_parameters"] = dict(ROPES[self.rope])
        place = head.config if name in BESIDE_LAYERS and not inner else layers
        for key in inner:
            place[key] = dict(place.get(key) or {})
            place = place[key]
        place.pop(name, None)
        if self.value is not MISSING:
            place[name] = copy.deepcopy(self.value)


def cases(names: set[str], head: Written) -> Iterator[Case]:
    """Every field with each of its values, by what ``head`` has there."""
    for field in sorted(names):
        *inner, name = field.split(".")
        ropes = [rope for rope, content in ROPES.items() if name in content] or ["default"]
        for rope in ropes if inner == ["rope_parameters"] else [""]:
            stated = {**KNOWN, **head.config, **head.layer_config, **ROPES.get(rope, {})}.get(name, 8)
            for label, value in values(stated):
                yield Case(field, label, value, rope)


def values(stated: Any) -> Iterator[tuple[str, Any]]:
    yield "absent", MISSING
    yield "null", None
    yield "string", stated.upper() if isinstance(stated, str) else json.dumps(stated)
    yield "list", [stated]
    yield "true", True
    yield "false", False
    yield "zero", 0
    yield "float", float(stated) if type(stated) is int else 0.5
    if type(stated) is float:
        yield "whole number", int(stated)
    yield "by type", {"full_attention": stated}
