"""The synthetic suite of tests/bench."""

from tests.bench.conftest import suite_file as suite_file
