"""The PromQL expressions of examples/deploy, and whether a server shows what they read."""

import json
import re

import yaml

from tests.support.serving import ROOT

DEPLOY = ROOT / "examples/deploy"
RULES = DEPLOY / "prometheus/peagle.rules.yml"
METRIC = re.compile(r"(vllm:\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)="([^"]*)"')


def dashboard_expressions() -> list[str]:
    """The queries of all panels, with Grafana's variables filled in."""
    dashboard = json.loads((DEPLOY / "grafana/dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [query.replace("$model", ".*").replace("$__rate_interval", "5m") for query in queries]


def rule_expressions() -> list[str]:
    return [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def missing(metrics: str) -> list[str]:
    """What dashboard and rules name and the text of /metrics lacks: metrics, and values of labels but ``job``."""
    lacking = set()
    for expression in [*dashboard_expressions(), *rule_expressions()]:
        for name, selector in METRIC.findall(expression):
            wanted = [f'{label}="{value}"' for label, value in MATCHER.findall(selector) if label != "job"]
            samples = re.findall(rf"^{name}(?:{{(.*)}})? ", metrics, re.MULTILINE)
            if not any(all(each in labels for each in wanted) for labels in samples):
                lacking.add(" ".join([name, *wanted]))
    return sorted(lacking)
