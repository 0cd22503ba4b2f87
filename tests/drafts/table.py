"""Every target on every arm: ``python -m tests.drafts.table`` runs test_targets.py whole and writes its findings."""

import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

from peagle_tools.shared.provenance import provenance

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks/results/targets.json"
ARMS = ("stock-v1", "plugin-v1", "plugin-v2")


def run(arm: str, path: str, report: Path) -> dict[str, dict[str, str]]:
    """What the tests of one arm found, by target and column; ``path`` is put before PYTHONPATH.

    Raises:
        SystemExit: a test failed.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1"]
    python_path = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PEAGLE_TEST_ARM": arm, "PYTHONPATH": python_path}
    command += [f"--junitxml={report}", "tests/drafts/test_targets.py"]
    if subprocess.run(command, cwd=ROOT, env=environment).returncode:
        raise SystemExit(f"{arm}: a test failed, no table is written")
    results: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        noted = {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}
        results.setdefault(noted["target"], {})[f"{arm}, K={noted['k']}"] = noted["drafts"]
    return results


def main() -> None:
    rows: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for arm, path in product(ARMS, ("", str(ROOT / ".cache/torchvision"))):
            for target, columns in run(arm, path, Path(folder, "report.xml")).items():
                rows.setdefault(target, {}).update(columns)
    RESULT.write_text(json.dumps({**provenance(), "targets": rows}, indent=1) + "\n")
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
