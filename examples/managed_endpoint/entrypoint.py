"""Start a server that is configured through its environment only, by the rules of AWS's vLLM container for SageMaker.

``SM_VLLM_X_Y=value`` is the flag ``--x-y value``. A value of ``true`` or an empty one makes a bare flag, ``false`` no
flag at all; a JSON array is one token for each element, an empty one no flag; everything else, a JSON object
too, is one token, unchanged. The model is ``SM_VLLM_MODEL``, else ``/opt/ml/model`` if it holds anything, else
``HF_MODEL_ID``. The port is 8080, where vLLM answers ``/ping`` and ``/invocations``.

The rules are those of ``sagemaker_args.py`` in github.com/aws/deep-learning-containers. As there, the server is started
by ``standard-supervisor`` (a dependency of vLLM), which installs ``/opt/ml/model/requirements.txt`` first.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

PREFIX = "SM_VLLM_"
ARTIFACTS = Path("/opt/ml/model")  # where SageMaker unpacks a model's artifacts
# vLLM takes these arrays as one JSON token, or one value for each time that the flag is given.
ONE_TOKEN = {"--allowed-origins", "--allowed-methods", "--allowed-headers", "--middleware"}
SUPERVISOR = "model_hosting_container_standards.supervisor.scripts.standard_supervisor"


def arguments(environment: Mapping[str, str], artifacts: Path = ARTIFACTS) -> list[str]:
    """The flags of ``vllm serve`` for these environment variables, in the order of their names."""
    flags = ["--port", "8080"]  # SM_VLLM_PORT comes later and counts
    if not environment.get(f"{PREFIX}MODEL"):
        flags += ["--model", _model(environment, artifacts)]
    for name in sorted(name for name in environment if name.startswith(PREFIX)):
        flag = "--" + name.removeprefix(PREFIX).lower().replace("_", "-")
        tokens = _tokens(flag, environment[name])
        if tokens is not None and (flag != "--model" or tokens):
            flags += [flag, *tokens]
    return flags


def _model(environment: Mapping[str, str], artifacts: Path) -> str:
    if artifacts.is_dir() and any(artifacts.iterdir()):
        return str(artifacts)
    if model := environment.get("HF_MODEL_ID"):
        return model
    sys.exit(f"no model is given: set {PREFIX}MODEL or HF_MODEL_ID, or put the model's files into {artifacts}")


def _tokens(flag: str, value: str) -> list[str] | None:
    """What follows a flag; None where the flag is left out."""
    word = value.strip().lower()
    if word in ("", "true"):
        return []
    if word == "false":
        return None
    try:
        elements = json.loads(value)
    except ValueError:
        return [value]
    if flag in ONE_TOKEN or not isinstance(elements, list):
        return [value]
    return [word if isinstance(word, str) else json.dumps(word) for word in elements] or None


def command(environment: Mapping[str, str]) -> list[str]:
    """The supervisor's command; ``%`` is doubled where supervisord starts the server, whose config expands it."""
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments(environment)]
    if environment.get("PROCESS_AUTO_RECOVERY", "true").lower() in ("true", "1"):
        server = [word.replace("%", "%%") for word in server]
    return [sys.executable, "-m", SUPERVISOR, *server]


if __name__ == "__main__":
    os.execv(sys.executable, command(os.environ))
