"""Start a server that is configured through its environment only, as managed endpoints do.

``SM_VLLM_MAX_MODEL_LEN=4096`` becomes ``--max-model-len 4096``, and so for every ``SM_VLLM_`` variable; an empty
value or ``true`` makes a bare flag, ``false`` its ``--no-`` form. The default port is 8080, where vLLM
answers ``/ping`` and ``/invocations``. ``SM_VLLM_SPECULATIVE_CONFIG`` switches P-EAGLE on.
"""

import os
import sys
from collections.abc import Mapping

PREFIX = "SM_VLLM_"
DEFAULTS = {"SM_VLLM_PORT": "8080"}


def arguments(environment: Mapping[str, str]) -> list[str]:
    """The flags of ``vllm serve`` for these environment variables."""
    flags: list[str] = []
    for name, value in sorted((DEFAULTS | dict(environment)).items()):
        if not name.startswith(PREFIX):
            continue
        flag = name.removeprefix(PREFIX).lower().replace("_", "-")
        match value.lower():
            case "" | "true":
                flags += [f"--{flag}"]
            case "false":
                flags += [f"--no-{flag}"]
            case _:
                flags += [f"--{flag}", value]
    return flags


if __name__ == "__main__":
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments(os.environ)]
    os.execv(sys.executable, command)
