"""The ``vllm.general_plugins`` entry point. vLLM calls it in every process, sometimes twice."""

import os


def is_disabled() -> bool:
    """Whether ``PEAGLE_VLLM_DISABLE`` leaves vLLM as it is."""
    return os.environ.get("PEAGLE_VLLM_DISABLE", "").lower() in ("1", "true", "yes", "on")


def register() -> None:
    """Install the patches, lazily, unless that is disabled."""
    if is_disabled():
        return
    from peagle_vllm.patches import install_all

    install_all()
