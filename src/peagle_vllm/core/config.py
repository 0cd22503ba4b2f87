"""Is this vLLM configuration P-EAGLE?"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig


class RefusedError(RuntimeError):
    """A P-EAGLE configuration that must not be served; the message is one line.

    No ValueError, because pydantic would wrap that into a message of several lines.
    """


def is_peagle(vllm_config: "VllmConfig") -> bool:
    """Whether this configuration drafts with a P-EAGLE head."""
    return is_peagle_spec(vllm_config.speculative_config)


def is_peagle_spec(spec: "SpeculativeConfig | None") -> bool:
    """The same of a ``SpeculativeConfig``. DFlash and DSpark draft in parallel too, by their own methods."""
    return spec is not None and spec.method == "eagle3" and bool(spec.parallel_drafting)
