"""The synthetic suite of tests/bench, and its stand-ins for server and client in this process."""

from tests.bench.conftest import elsewhere as elsewhere
from tests.bench.conftest import suite_file as suite_file
