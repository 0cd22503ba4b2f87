"""Gives vLLM the fields of a head's config that it does not read in the head's own dialect."""

import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from peagle_vllm.patches.ledger import Patch
from peagle_vllm.patches.patching import wrap

PATCH = Patch(
    name="head-config",
    runner="both",
    why="Heads of NeMo and SpecForge carry architecture names that vLLM does not know; a speculators head's fc_norm, "
    "the number of its aux hidden states, and aux layers inside eagle_config are not read everywhere. And a head's own "
    "code would run where trust_remote_code is set for the target.",
    delete_when="every head of tests/heads/writers.py has an empty Head.mapped and drafts correctly in stock vLLM",
    depends_on={
        "vllm.config.speculative": ("SpeculativeConfig.compose_draft_hf_overrides",),
        # How vLLM reads a head's config, which heads/config.py repeats.
        "vllm.transformers_utils.configs.eagle": ("EAGLEConfig.__init__",),
        "vllm.transformers_utils.configs.speculators.algos": ("update_eagle3", "update_peagle"),
        "vllm.transformers_utils.configs.speculators.base": (
            "SpeculatorsConfig.extract_transformers_pre_trained_config",
        ),
    },
)

Override = Callable[[Any], Any]

_fields: contextvars.ContextVar[Mapping[str, Any] | None] = contextvars.ContextVar("peagle_head_fields", default=None)


@contextmanager
def serving(fields: Mapping[str, Any], target: Any) -> Iterator[None]:
    """Draft configs that are built meanwhile get ``fields`` (``Head.mapped``) on top of their own, and run no code.

    vLLM gives a draft model the ``trust_remote_code`` of its target (a ``ModelConfig``), which nobody said of the head.
    """
    token = _fields.set(fields)
    trusted, target.trust_remote_code = target.trust_remote_code, False
    try:
        yield
    finally:
        target.trust_remote_code = trusted
        _fields.reset(token)


def with_fields(inner: Override, fields: Mapping[str, Any], hf_config: Any) -> Any:
    """vLLM's own override, then ``fields``. A module's function, because a config is pickled on its way to workers."""
    hf_config = inner(hf_config)
    hf_config.update(dict(fields))
    return hf_config


def install(module: ModuleType) -> None:
    config = module.SpeculativeConfig

    @wrap(config, "compose_draft_hf_overrides")
    def compose_draft_hf_overrides(original: Any, *args: Any, **kwargs: Any) -> Override:
        composed, fields = original(*args, **kwargs), _fields.get()
        return functools.partial(with_fields, composed, dict(fields)) if fields else composed

    config.compose_draft_hf_overrides = staticmethod(config.compose_draft_hf_overrides)
