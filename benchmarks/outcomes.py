"""A pytest plugin: each test's outcome is on the disk when it ends; pytest writes its JUnit file after the last one."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import arms, turns
from peagle_tools.train.lines import add_line


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True, help="this file gets a line of JSON for each test")


def pytest_configure(config: pytest.Config) -> None:
    arms.note_kernels()
    turns.share()
    config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))


class Outcomes:
    def __init__(self, file: Path):
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup":
            self.test: dict[str, Any] = {"name": report.nodeid.rpartition("::")[2], "outcome": "passed"}
        if not report.passed and self.test["outcome"] == "passed":
            message = getattr(getattr(report.longrepr, "reprcrash", report.longrepr), "message", str(report.longrepr))
            self.test |= {"outcome": "skipped" if report.skipped else "failed", "message": message[:2000]}
        if report.when == "teardown":
            add_line(self.file, self.test | {name: str(value) for name, value in report.user_properties})
