"""A few seeds of the fuzzer, the same ones every time; ``make fuzz`` runs new ones."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from tests.conftest import ARM
from tests.drafts.configurations import draw
from tests.drafts.fuzz import Fuzzer, add

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")

SEEDS = (128,) if ARM == "plugin-v2" else (7, 14, 94)  # windows, aborts, chunks, a selector, a schedule of K


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Fuzzer:
    return Fuzzer(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("seed", SEEDS)
def test_drafts_and_output(seed: int, fuzzer: Fuzzer):
    print(*draw(seed).choices(), sep="\n")
    seen = fuzzer.run(seed, waves=1)
    print(seen.report, dict(seen.counts))
    assert seen.report.rows > 20


def test_a_seed_is_always_the_same_and_seeds_choose_everything():
    assert draw(7) == draw(7) != draw(8)
    chosen = defaultdict(set)
    for seed in range(200):
        for choice in draw(seed).choices():
            name, _, value = choice.partition(": ")
            chosen[name].add(value)
    alone = {name: values for name, values in chosen.items() if len(values) < 2}
    assert alone == ({} if ARM == "plugin-v2" else {"graphs": {"none"}, "kernels": {"torch twins"}})


def test_results_add_up(tmp_path: Path):
    results = tmp_path / "fuzz.json"
    add(results, 0, {"rows": 5, "by": {"a": 5}}, None)
    add(results, 1, {}, "AssertionError: wrong")
    assert add(results, 2, {"rows": 7, "by": {"b": 7}}, None)["differences"] == {"1": "AssertionError: wrong"}
    mine = add(results, 1, {"rows": 1, "by": {"a": 1}}, None)
    assert mine == {"seeds": 3, "rows": 13, "by": {"a": 6, "b": 7}, "differences": {}}
    assert json.loads(results.read_text()) == {ARM: mine}
