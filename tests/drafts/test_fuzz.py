"""A few seeds of the fuzzer, the same ones every time; ``make fuzz`` runs new ones."""

from dataclasses import replace

import pytest

from tests.conftest import ARM
from tests.drafts.configurations import draw
from tests.drafts.fuzz import Fuzzer

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")

# Windows, aborts, chunks, a selector, a schedule of K; on V2 graphs, and a head with layers in several KV cache groups.
SEEDS = (131,) if ARM == "plugin-v2" else (7, 14, 94)


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Fuzzer:
    return Fuzzer(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("seed", SEEDS)
def test_drafts_and_output(seed: int, fuzzer: Fuzzer):
    print(replace(draw(seed), waves=()))
    assert draw(seed) == draw(seed) != draw(seed + 1)
    seen = fuzzer.run(seed, waves=1)
    print(seen.report, dict(seen.counts))
    assert seen.report.rows > 20
