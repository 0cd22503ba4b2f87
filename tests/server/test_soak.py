"""The soak (tests/soak/run.py), short: ``make soak`` is the long one."""

import pytest

from tests.soak import watching
from tests.soak.clients import Tally, note
from tests.soak.run import run
from tests.soak.traffic import Ask


@pytest.mark.full
def test_a_minute_of_everything_at_once():
    report = run(seconds=60, runner="V1")
    assert not report["wrong"], "\n".join(report["wrong"][:20])
    assert report["answers compared"] > 50 and report["preemptions"] > 10
    assert min(report["faults"].values()) > 0


def test_what_is_wrong_is_noticed():
    """A wrong answer, a request that never ended, one that was to be refused, and memory that grows."""
    tally, ask = Tally(), Ask("chat", "/", {"max_tokens": 3}, known=0)
    note(tally, ask, "answered", [("right", "stop", 3)], {}, {0: ("right", "stop", 3)})
    assert not tally.wrong
    note(tally, ask, "answered", [("wrong", "stop", 3)], {}, {0: ("right", "stop", 3)})
    note(tally, ask, "stuck", [], {}, {})
    note(tally, Ask("wrong", "/", b"", refused=True), "500", [], {}, {})
    assert len(tally.wrong) == 3
    flat = [{"megabytes": 500.0, "files": 100.0}] * 40
    assert watching.grown(flat) == []
    assert len(watching.grown([sample | {"megabytes": 500.0 + 20 * i} for i, sample in enumerate(flat)])) == 1
