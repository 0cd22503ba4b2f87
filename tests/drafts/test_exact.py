"""Every draft of a running engine equals the plain torch simulation, over a pairwise grid.

The engine verifies planted drafts (``recorder.planter``), so every rejection count occurs and acceptance
does not depend on how good a random head is; the greedy output must not notice.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests import tiny_heads
from tests.conftest import ARM
from tests.drafts.grid import FACTORS, MAX_MODEL_LEN, Cell, pairs, pairwise_cells, requests
from tests.drafts.recorder import MAX_TIE_SHARE, Report, compare, planter, record
from tests.drafts.reference import Reference
from tests.engines import Finished, Request, Settings, count_preemptions, engine

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2", "stock-v1")

CELLS = pairwise_cells()
LEAST_ROWS = {"plugin-v1": 4000, "plugin-v2": 1000, "stock-v1": 2000}
LEAST_ROWS_FULL = {"plugin-v1": 20_000, "plugin-v2": 4000, "stock-v1": 10_000}


@dataclass
class Totals:
    """What a whole grid saw."""

    cells: set[str] = field(default_factory=set)
    report: dict[str, Report] = field(default_factory=dict)  # by dtype
    rejections: set[tuple[int, int]] = field(default_factory=set)  # (K, refused)
    preemptions: int = 0
    cached_tokens: int = 0


@pytest.fixture(scope="module")
def totals() -> dict[str, Totals]:
    return {"grid": Totals(), "full": Totals()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


def target_folder(folder: Path, family: str) -> Path:
    target = folder / family
    return target if target.exists() else tiny_heads.write_target(target, family)


class Unspeculated:
    """Greedy outputs without speculation, one engine for each target and dtype."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.known: dict[tuple, dict[str, Finished]] = {}

    def __call__(self, family: str, dtype: str, asked: list[Request]) -> dict[str, Finished]:
        key = (family, dtype, tuple(asked))
        if key not in self.known:
            settings = Settings(target_folder(self.folder, family), max_model_len=MAX_MODEL_LEN, dtype=dtype)
            self.known[key] = engine(settings).run(asked)
        return self.known[key]


@pytest.fixture(scope="module")
def unspeculated(folder: Path) -> Unspeculated:
    return Unspeculated(folder)


def as_stock_can(cell: Cell, asked: list[Request]) -> tuple[Cell, list[Request]]:
    """Stock V1 without what its defects touch; test_stock_defects.py reproduces each.

    Chunked prefill (prompt-token slip) and requests that come near max_model_len (nobody drafts then).
    """
    room = MAX_MODEL_LEN - 2 * cell.k - 1
    asked = [replace(r, prompt=r.prompt[: room - 8]) for r in asked]
    asked = [replace(r, max_tokens=min(r.max_tokens, room - len(r.prompt))) for r in asked]
    return replace(cell, prefill="whole"), asked


def check(cell: Cell, size: int, seed: int, folder: Path, unspeculated: Unspeculated, totals: Totals) -> None:
    """One engine of this cell: its drafts, its output, and what it contributes to the totals."""
    asked = requests(cell.requests, size, seed)
    totals.cells.add(str(cell))
    if ARM == "stock-v1":
        cell, asked = as_stock_can(cell, asked)
    target, head = target_folder(folder, cell.family), folder / str(cell)
    tiny_heads.write_head(head, target, cell.head_spec())
    right = unspeculated(cell.family, cell.dtype, asked)
    reference = Reference(target, head, cell.dtype)

    live = engine(cell.settings(target, head))
    plant = planter({req: done.tokens for req, done in right.items()}, tiny_heads.VOCAB)
    with record(live, plant, keep_hidden=cell.dtype == "bfloat16") as noted, count_preemptions(live) as preempted:
        finished = live.run(asked)

    report = compare(noted, finished, reference, k=cell.k, max_model_len=MAX_MODEL_LEN)
    print(report, *report.ties, sep="\n")
    if cell.dtype == "float32":
        different = [req for req in right if finished[req].output != right[req].output]
        assert not different, f"greedy output is not the unspeculated one: {different}"
    totals.report.setdefault(cell.dtype, Report()).__iadd__(report)
    totals.rejections |= {(cell.k, refused) for refused in report.rejections}
    totals.preemptions += len(preempted)
    totals.cached_tokens += sum(done.num_cached_tokens for done in finished.values())


def check_totals(totals: Totals, cells: list[Cell], least_rows: int) -> None:
    if totals.cells != {str(cell) for cell in cells}:
        pytest.skip("needs every cell of the grid in this run")
    whole = Report()
    for dtype, report in totals.report.items():
        whole += report
        print(f"{dtype}: {report}")
        assert len(report.ties) <= MAX_TIE_SHARE[dtype] * report.rows
    print(f"{totals.preemptions} preemptions, {totals.cached_tokens} cached tokens")
    assert whole.rows >= least_rows
    assert totals.rejections == {(k, refused) for k in FACTORS["k"] for refused in range(k + 1)}
    assert totals.preemptions > 0
    assert totals.cached_tokens > 0
    if ARM != "stock-v1":
        assert whole.dropped["partial prefill"] > 0
        assert whole.near_end > 0


def test_the_grid_holds_every_pair():
    wanted = {pair for cell in CELLS for pair in pairs(cell)}
    names = list(FACTORS)
    assert len(wanted) == sum(len(FACTORS[a]) * len(FACTORS[b]) for i, a in enumerate(names) for b in names[i + 1 :])


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_drafts(cell: Cell, folder: Path, unspeculated: Unspeculated, totals: dict[str, Totals]):
    check(cell, 40, 0, folder, unspeculated, totals["grid"])


def test_totals(totals: dict[str, Totals]):
    check_totals(totals["grid"], CELLS, LEAST_ROWS[ARM])
