"""The files of examples/deploy fit together, and to the package; what /metrics shows is in test_managed_endpoint.py."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from peagle_vllm import __version__
from tests.examples.monitoring import DEPLOY, RULES, dashboard_expressions
from tests.serving import ROOT

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
    assert flags(container["args"]) == PAIR
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()


def test_image_is_built_from_files_that_are_sent() -> None:
    """Every COPY from the repository is let through by the ignore file, and exists."""
    copies = [
        source
        for line in (DEPLOY / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ")
        for source in line.split()[1:-1]
    ]
    sent = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copies) == sent
    assert all((ROOT / source).exists() for source in copies)


def test_artifacts_name_this_version() -> None:
    lines = (ROOT / "examples/managed_endpoint/artifacts/requirements.txt").read_text().splitlines()
    assert lines[-1] == f"peagle-vllm=={__version__}"


def promtool(*arguments: str | Path) -> None:
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_configuration() -> None:
    promtool("check", "config", DEPLOY / "prometheus/prometheus.yml")


def test_each_alert_fires_on_what_it_is_for() -> None:
    promtool("test", "rules", ROOT / "tests/examples/peagle.rules.test.yml")


def test_dashboard_queries_are_promql(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{n}", "expr": each} for n, each in enumerate(dashboard_expressions())]
    assert len(rules) > 15
    path = tmp_path / "dashboard.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", path)


def test_rules_are_those_that_prometheus_loads() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    assert config["rule_files"] == [RULES.name]
