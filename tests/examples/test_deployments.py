"""The files of examples/deploy fit together, and to the package; an endpoint reads its environment; example.py runs."""

import json
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
import yaml
from model_hosting_container_standards.supervisor.generator import generate_supervisord_config
from model_hosting_container_standards.supervisor.models import parse_environment_variables
from supervisor.options import UnhosedConfigParser, expand

from examples.managed_endpoint.entrypoint import arguments, command
from peagle_tools.shared.engines import quick_dtype
from peagle_vllm import __version__
from tests.support.serving import ROOT, environment, free_port, running

DEPLOY = ROOT / "examples/deploy"
METRIC = re.compile(r"(vllm:\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)="([^"]*)"')
PAIR = yaml.safe_load((ROOT / "examples/pairs/gpt-oss-20b.yaml").read_text())


def flags(arguments: list[str]) -> dict:
    given = dict(argument.removeprefix("--").split("=", 1) for argument in arguments)
    return given | {"speculative-config": json.loads(given["speculative-config"])}


def test_compose_serves_the_published_pair() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert flags(services["vllm"]["command"]) == PAIR
    for service in services.values():
        for mount in service.get("volumes", []):
            if mount.startswith("./"):
                assert (DEPLOY / mount.split(":")[0]).exists(), mount


def test_kubernetes_serves_the_published_pair() -> None:
    deployment = next(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert flags(container["args"]) == PAIR | {"shutdown-timeout": "50"}
    startup = container["startupProbe"]
    assert deployment["spec"]["progressDeadlineSeconds"] > startup["periodSeconds"] * startup["failureThreshold"]
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()


def test_image_is_built_from_files_that_are_sent() -> None:
    """Every COPY from the repository is let through by the ignore file, and exists."""
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    copies = [source for line in lines if line.startswith("COPY ") for source in line.split()[1:-1]]
    sent = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copies) == sent
    assert all((ROOT / source).exists() for source in copies)


def test_artifacts_name_this_version() -> None:
    lines = (ROOT / "examples/managed_endpoint/artifacts/requirements.txt").read_text().splitlines()
    assert lines[-1] == f"peagle-vllm=={__version__}"


def rules() -> list[dict]:
    groups = yaml.safe_load((DEPLOY / "prometheus/peagle.rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_each_alert_has_a_case_in_which_it_fires() -> None:
    """Whether it does, ``promtool test rules`` says of that file."""
    cases = (ROOT / "tests/examples/peagle.rules.test.yml").read_text()
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert alerts and set(re.findall(r'alertname="(\w+)"', cases)) == alerts


def missing(metrics: str) -> list[str]:
    """What dashboard and rules name and the text of /metrics lacks: metrics, and values of labels but ``job``."""
    dashboard = json.loads((DEPLOY / "grafana/dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries = [query.replace("$model", ".*").replace("$__rate_interval", "5m") for query in queries]
    lacking = set()
    for expression in (*queries, *(rule["expr"] for rule in rules())):
        for name, selector in METRIC.findall(expression):
            wanted = [f'{label}="{value}"' for label, value in MATCHER.findall(selector) if label != "job"]
            samples = re.findall(rf"^{name}(?:{{(.*)}})? ", metrics, re.MULTILINE)
            if not any(all(label in labels for label in wanted) for labels in samples):
                lacking.add(" ".join([name, *wanted]))
    return sorted(lacking)


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
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.url}/invocations", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)
        assert answer["choices"][0]["message"]["content"]
        assert server.metric("vllm:spec_decode_num_drafts_total") > 0
        assert missing(server.get("/metrics")) == []  # of what examples/deploy draws and warns of


def test_example() -> None:
    # In one process, where three would import vLLM.
    env = environment() | {"TARGET": "tiny", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, "example.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("--- 'def ") == 2
    length = re.search(r"acceptance length (\S+) over (\d+) drafts", done.stdout)
    assert length and float(length[1]) > 1.5


def test_dtype_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    slow, arm = {"architecture": "x86_64", "avx512_bf16": False}, {"architecture": "aarch64"}
    for cpu, dtype in ((slow, "float32"), (slow | {"avx512_bf16": True}, "bfloat16"), (arm, "bfloat16")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda cpu=cpu: cpu)
        assert quick_dtype() == dtype
