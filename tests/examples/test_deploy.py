"""The files of examples/deploy fit together, and to the package.

What /metrics shows of the metrics that they read is in test_managed_endpoint.py.
"""

import json
import re

import yaml

from peagle_vllm import __version__
from tests.support.serving import ROOT

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
