"""Every draft of a running engine equals the plain torch simulation, over a pairwise grid; ``make fuzz`` goes further.

The engine verifies planted drafts (``recorder.planter``), so every rejection count occurs and acceptance
does not depend on how good a random head is; the greedy output must not notice.
"""

import json
import math
import os
import random
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import ARM
from tests.drafts.grid import ALL_CHOICES, FACTORS, V2, Cell, pairwise_cells, random_cell, traffic
from tests.drafts.running import Runner
from tests.support.recorder import MAX_TIE_SHARE, Report

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")
CELLS = pairwise_cells()
SIZE = 14 if V2 else 26  # output tokens of most requests: on V2 the interpreter takes a tenth of a second for a row
LEAST_ROWS = 800  # of all cells together


@pytest.fixture(scope="module")
def totals() -> SimpleNamespace:
    """What the whole grid saw; ``rejections`` are of (K, refused)."""
    return SimpleNamespace(cells=set(), by_dtype=defaultdict(Report), rejections=set())


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("tiny"), SIZE)


# In every ninth cell our kernels run, from one on with graphs, a selector and look-up; in test_basics.py everywhere.
MARKED = [pytest.param(c, id=str(c), marks=pytest.mark.kernels if i % 9 == 4 else ()) for i, c in enumerate(CELLS)]


@pytest.mark.parametrize("cell", MARKED)
def test_drafts(cell: Cell, runner: Runner, totals: SimpleNamespace):
    """One engine of this cell: its drafts, its output, and what it contributes to the totals."""
    totals.cells.add(str(cell))
    report = runner.run(cell, [traffic(random.Random(str(cell)), cell.requests, SIZE)])
    print(report, report.counts, *report.ties, sep="\n")
    totals.by_dtype[cell.dtype] += report
    totals.rejections |= {(cell.k, refused) for refused in report.rejections}


def test_totals(totals: SimpleNamespace):
    assert totals.cells == {str(cell) for cell in CELLS}, "these are totals: select the cells too"
    whole = Report()
    for dtype, report in totals.by_dtype.items():
        whole += report
        assert len(report.ties) <= math.ceil(MAX_TIE_SHARE[dtype] * report.tokens)
    print(whole, whole.counts)
    assert whole.rows >= LEAST_ROWS
    for k in FACTORS["k"]:
        refused = {count for depth, count in totals.rejections if depth == k}
        assert k in refused and len(refused) > k // 3 and (0 in refused or k > 8), k
    assert whole.dropped["partial prefill"] > 0
    assert whole.near_end > 0
    assert whole.looked_up > LEAST_ROWS // 40
    kinds = ("preemptions", "async waves", "aborted requests", "cached tokens", *("full", "piecewise", "eager") * V2)
    assert all(whole.counts[kind] > 0 for kind in kinds)


FUZZ = range(*map(int, os.environ.get("PEAGLE_FUZZ", "1:2").split(":")))  # seeds, as ``make fuzz`` gives them


@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s % 10 else pytest.mark.kernels) for s in FUZZ])
def test_random_cells(seed: int, runner: Runner):
    """Cells of rare choices, too, under more traffic; the seed decides everything."""
    rng = random.Random(f"{ARM} {seed}")
    cell = random_cell(rng, ALL_CHOICES)
    report = runner.run(cell, [traffic(rng, rng.randint(4, 14), SIZE) for _ in range(3)])
    print(cell, report, sep="\n")
    if results := os.environ.get("PEAGLE_FUZZ_RESULTS"):
        seen = {"rows": report.rows, "ties": len(report.ties), "rows at max_model_len": report.near_end}
        with Path(results).open("a") as file:
            file.write(json.dumps({"arm": ARM, "seed": seed, "cell": str(cell), **seen, **report.counts}) + "\n")
