"""Gives vLLM a head's config as ``heads/fields.py`` reads it, whatever the head's own dialect."""

import contextvars
import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from peagle_vllm.patches.ledger import Patch

PATCH = Patch(
    name="head-config",
    runner="both",
    depends_on={
        "vllm.transformers_utils.config": ("register_config_parser", "get_config_parser"),
        # How vLLM reads a head's config, which heads/config.py repeats.
        "vllm.transformers_utils.configs.eagle": ("EAGLEConfig.__init__",),
        "vllm.transformers_utils.configs.speculators.algos": ("update_eagle3", "update_peagle"),
        "vllm.transformers_utils.configs.speculators.base": (
            "SpeculatorsConfig.__init__",
            "SpeculatorsConfig.extract_transformers_pre_trained_config",
        ),
    },
)

FORMAT = "peagle-head"  # vLLM's name of the parser

_fields: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar("peagle_head_fields")


@contextmanager
def serving(fields: Mapping[str, Any], target: Any) -> Iterator[None]:
    """Draft configs that are built meanwhile have ``fields`` (``vllm_fields``), and run no code.

    vLLM gives a draft model the config format and the ``trust_remote_code`` of its target (a ``ModelConfig``).
    """
    length = max(fields["max_position_embeddings"] or 0, target.max_model_len)
    token = _fields.set({**fields, "max_position_embeddings": length})
    before = target.config_format, target.trust_remote_code
    target.config_format, target.trust_remote_code = FORMAT, False
    try:
        yield
    finally:
        target.config_format, target.trust_remote_code = before
        _fields.reset(token)


def register_parser(module: ModuleType) -> None:
    from vllm.transformers_utils.config import register_config_parser
    from vllm.transformers_utils.config_parser_base import ConfigParserBase
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    @register_config_parser(FORMAT)
    class HeadConfigParser(ConfigParserBase):
        def parse(self, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], Any]:
            """The fields, and vLLM's config of a head that is flat already."""
            fields = copy.deepcopy(dict(_fields.get()))
            return fields, SpeculatorsConfig(**fields)


PATCH.hooks.append(("vllm.config.speculative", register_parser))
