"""The ``vllm.general_plugins`` entry point. vLLM calls it in every process, sometimes twice."""

import os


def register() -> None:
    """Install the patches, lazily. ``PEAGLE_VLLM_DISABLE=1`` leaves vLLM as it is."""
    if os.environ.get("PEAGLE_VLLM_DISABLE") == "1":
        return
    from peagle_vllm.patches import install_all

    install_all()
