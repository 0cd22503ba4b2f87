"""The soak (tests/soak/run.py), short: ``make soak`` is the long one."""

import pytest

from tests.soak.run import run

pytestmark = pytest.mark.full


def test_a_minute_of_everything_at_once():
    report = run(seconds=60, runner="V1")
    assert not report["wrong"], "\n".join(report["wrong"][:20])
    assert report["answers compared"] > 50 and report["preemptions"] > 10
    assert min(report["faults"].values()) > 0
