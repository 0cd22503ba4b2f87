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
    return spec is not None and spec.method == "eagle3" and bool(spec.parallel_drafting) and on_vllm_platform()


def on_vllm_platform() -> bool:
    """Whether the platform is one of vLLM's own: CPU, CUDA, ROCm, XPU.

    Any other (a plugin such as vllm-ascend, the TPU's) brings workers and model runners of its own, and keeps its own
    behaviour. The platform is known before vLLM builds a configuration, the worker class it picks only in the midst.
    """
    from vllm.platforms import current_platform

    return type(current_platform).__module__.partition(".")[0] == "vllm"
