"""A deployment that is configured through its environment only."""

import json
import shlex
import sys
import urllib.request
from pathlib import Path

import pytest
from model_hosting_container_standards.supervisor.generator import generate_supervisord_config
from model_hosting_container_standards.supervisor.models import parse_environment_variables
from supervisor.options import UnhosedConfigParser, expand

from examples.managed_endpoint.entrypoint import arguments, command
from tests.examples.test_deploy import missing
from tests.support.serving import ROOT, environment, free_port, running

FOLDER = Path("examples/managed_endpoint")


def variables(file: str) -> dict[str, str]:
    """A file as ``docker run --env-file`` reads it."""
    lines = (ROOT / FOLDER / file).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


FLAGS = {
    "ALLOWED_ORIGINS": ('["https://a"]', ["--allowed-origins", '["https://a"]']),
    "CHAT_TEMPLATE": ("{% for m in messages %}", ["--chat-template", "{% for m in messages %}"]),
    "CUSTOM_OPS": ("[]", []),
    "ENABLE_CHUNKED_PREFILL": ("", ["--enable-chunked-prefill"]),
    "ENABLE_PREFIX_CACHING": ("false", []),
    "ENFORCE_EAGER": ("true", ["--enforce-eager"]),
    "LORA_MODULES": ('[{"name": "l"}, {"name": "m"}]', ["--lora-modules", '{"name": "l"}', '{"name": "m"}']),
    "MAX_MODEL_LEN": ("4096", ["--max-model-len", "4096"]),
    "MODEL": ("m", ["--model", "m"]),
    "PORT": ("1", ["--port", "1"]),
    "SERVED_MODEL_NAME": ('["a", "b c"]', ["--served-model-name", "a", "b c"]),
    "SPECULATIVE_CONFIG": ('{"method":  "eagle3"}', ["--speculative-config", '{"method":  "eagle3"}']),
}


def test_variables_become_flags() -> None:
    """The rules of AWS's container, as its sagemaker_args.py states them; the last --port counts."""
    given = {"HOME": "/"} | {f"SM_VLLM_{name}": value for name, (value, _) in FLAGS.items()}
    assert arguments(given) == ["--port", "8080", *(word for _, words in FLAGS.values() for word in words)]


def test_where_the_model_comes_from(tmp_path: Path) -> None:
    def model(**given: str) -> str:
        flags = arguments(given, artifacts=tmp_path)
        assert flags.count("--model") == 1
        return flags[flags.index("--model") + 1]

    with pytest.raises(SystemExit, match="SM_VLLM_MODEL or HF_MODEL_ID"):
        model()
    assert model(HF_MODEL_ID="hub") == "hub"
    (tmp_path / "config.json").touch()
    assert model(HF_MODEL_ID="hub") == str(tmp_path)
    assert model(HF_MODEL_ID="hub", SM_VLLM_MODEL="") == str(tmp_path)
    assert model(HF_MODEL_ID="hub", SM_VLLM_MODEL="named") == "named"


def test_supervisord_starts_the_server_with_every_flag() -> None:
    given = {"HF_MODEL_ID": "m", "SM_VLLM_CHAT_TEMPLATE": FLAGS["CHAT_TEMPLATE"][0]}
    config = generate_supervisord_config(parse_environment_variables(), shlex.join(command(given)[3:]))
    read = UnhosedConfigParser()
    read.read_string(config)
    words = shlex.split(expand(read.get("program:app", "command"), {}, "command"))
    assert words[3:] == arguments(given)
    assert command(given | {"PROCESS_AUTO_RECOVERY": "false"})[6:] == arguments(given)  # it starts the server itself


def test_endpoint_serves_with_drafts() -> None:
    port = free_port()
    given = variables("tiny.env") | {"SM_VLLM_PORT": str(port), "SM_VLLM_HOST": "127.0.0.1"}
    given |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the worker in the engine's process: one import of vLLM less
    command = [sys.executable, str(FOLDER / "entrypoint.py")]
    with running(command, port, environment() | given, ready="/ping") as server:
        body = {"messages": [{"role": "user", "content": "def greet(name):\n"}], "max_tokens": 32, "temperature": 0}
        request = urllib.request.Request(
            server.url + "/invocations", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)
        assert answer["choices"][0]["message"]["content"]
        assert server.metric("vllm:spec_decode_num_drafts_total") > 0
        assert missing(server.get("/metrics")) == []  # of what examples/deploy draws and warns of
