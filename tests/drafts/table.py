"""Every target on every arm: ``python -m tests.drafts.table`` runs test_targets.py whole and writes its findings."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from peagle_vllm.provenance import provenance

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks/results/targets.json"
ARMS = ("stock-v1", "plugin-v1", "plugin-v2")


def run(arm: str, report: Path) -> dict[str, dict[str, str]]:
    """What the tests of one arm found, by target and column.

    Raises:
        SystemExit: a test failed.
    """
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}")
    environment = os.environ | {"PEAGLE_TEST_ARM": arm}
    if subprocess.run([*command, "tests/drafts/test_targets.py"], cwd=ROOT, env=environment).returncode:
        raise SystemExit(f"{arm}: a test failed, no table is written")
    found: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        noted = {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}
        columns = found.setdefault(noted.pop("target"), {})
        k = noted.pop("k", None)
        for column, value in noted.items():
            columns[arm + f", K={k}" if column == "drafts" else column] = value
    return found


def main() -> None:
    rows: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for arm in ARMS:
            for target, columns in run(arm, Path(folder, f"{arm}.xml")).items():
                rows.setdefault(target, {}).update(columns)
    RESULT.write_text(json.dumps({**provenance(), "targets": rows}, indent=1) + "\n")
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
