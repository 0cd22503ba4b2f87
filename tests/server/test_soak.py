"""The soak (tests/soak/run.py), short: ``make soak`` is the long one."""

import pytest

from tests.soak.run import Tally, run
from tests.soak.traffic import Ask


@pytest.mark.full
def test_a_minute_of_everything_at_once():
    report = run(seconds=60, runner="V1")
    assert not report["wrong"], "\n".join(report["wrong"][:20])
    assert report["answers compared"] > 50 and report["preemptions"] > 10
    assert report["ended"]["left"] and report["ended"]["refused"]


def test_what_is_wrong_is_noticed():
    """A wrong answer, a request that never ended, and one that was to be refused."""
    tally, ask, right = Tally(), Ask("chat", {}, known=0), {0: ("right", "stop")}
    tally.note(ask, "answered", ("right", "stop"), right)
    assert not tally.wrong
    tally.note(ask, "answered", ("wrong", "stop"), right)
    tally.note(ask, "APITimeoutError: Request timed out.", None, right)
    tally.note(Ask("wrong", {}), "500", None, right)
    tally.note(Ask("wrong", {}), "answered", ("yes", "stop"), right)
    assert len(tally.wrong) == 4
