"""Every draft of a running engine equals the plain torch simulation, over a pairwise grid; ``fuzz`` goes further.

The engine verifies planted drafts (``recorder.planter``), so every rejection count occurs and acceptance
does not depend on how good a random head is; the greedy output must not notice.
"""

import math
from collections import Counter, defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.conftest import ARM
from tests.drafts.grid import FACTORS, MAX_MODEL_LEN, Cell, pairwise_cells, requests, without_stock_defects
from tests.support import random_heads as tiny_heads
from tests.support.engines import Finished, Request, Settings, engine, watch_preemptions, without_speculation
from tests.support.graphs import emulate
from tests.support.recorder import MAX_TIE_SHARE, Report, compare, planter, record
from tests.support.reference import Reference
from tests.support.updates import TRANSFER, files, updatable, update

TOP_1 = (("temperature", 1.5), ("top_k", 1))
V2, STOCK = ARM == "plugin-v2", ARM == "stock-v1"
# That stock vLLM, too, drafts what the simulation drafts, test_stock_defects.py and test_targets.py show with fewer.
pytestmark = [pytest.mark.arm("plugin-v1", "plugin-v2", "stock-v1"), *[pytest.mark.full] * STOCK]
CELLS = pairwise_cells()
SIZE = 26  # output tokens of most requests: on V2 the interpreter takes a tenth of a second for a row
LEAST_ROWS = 500 if STOCK else 1000  # of all cells together
LEAST_SHARE_FROM_GRAPHS = 0.3  # of V2's rows


@dataclass
class Totals:
    """What the whole grid saw."""

    cells: set[str] = field(default_factory=set)
    report: dict[str, Report] = field(default_factory=lambda: defaultdict(Report))  # by dtype
    rejections: set[tuple[int, int]] = field(default_factory=set)  # (K, refused)
    preemptions: int = 0
    cached_tokens: int = 0
    modes: Counter[str] = field(default_factory=Counter)  # draft batches on V2, eager ones beside graphs included
    from_graphs: int = 0  # rows of runs in which graphs served what they could


@pytest.fixture(scope="module")
def totals() -> Totals:
    return Totals()


class Unspeculated:
    """Targets, and their greedy outputs without speculation: one engine start for each target and dtype."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.known: dict[tuple[str, str], dict[str, Finished]] = {}

    def target(self, family: str) -> Path:
        target = self.folder / family
        return target if target.exists() else tiny_heads.write_target(target, family)

    def __call__(self, cell: Cell) -> dict[str, Finished]:
        key = (cell.family, cell.dtype)
        if key not in self.known:
            settings = Settings(self.target(cell.family), max_model_len=MAX_MODEL_LEN, dtype=cell.dtype)
            every = [request for count in FACTORS["requests"] for request in asked(count)]
            self.known[key] = without_speculation(settings, every)
        return self.known[key]


@pytest.fixture(scope="module")
def unspeculated(tmp_path_factory: pytest.TempPathFactory) -> Unspeculated:
    return Unspeculated(tmp_path_factory.mktemp("tiny"))


def asked(count: int) -> list[Request]:
    wave = requests(count, SIZE)
    return without_stock_defects(wave) if STOCK else wave


def is_drawn(req: str) -> bool:
    """One in three requests of a batch: none of their drafts is accepted, so they take many steps."""
    return int(req.rpartition(".")[2]) % 3 == 0


# Every ninth cell runs our kernels, one of them from graphs; all of test_basics.py does.
MARKED = [pytest.param(cell, id=str(cell), marks=() if i % 9 else pytest.mark.kernels) for i, cell in enumerate(CELLS)]


@pytest.mark.parametrize("cell", MARKED)
def test_drafts(cell: Cell, unspeculated: Unspeculated, totals: Totals):
    """One engine of this cell: its drafts, its output, and what it contributes to the totals."""
    totals.cells.add(str(cell))
    graphs = V2 and CELLS.index(cell) % 2 == 1
    if STOCK:
        cell = replace(cell, prefill="whole", lookup=0, drafts="greedy", weights="loaded")
    target, head = unspeculated.target(cell.family), unspeculated.folder / str(cell)
    tiny_heads.write_head(head, target, cell.head_spec())
    right = unspeculated(cell)
    reference = Reference(target, head, cell.dtype, selector=not STOCK)  # stock vLLM drafts without the selector
    planted = planter({req: done.tokens for req, done in right.items()}, tiny_heads.VOCAB)
    # Drafts that are drawn stay: others would not be of the distribution that the sampler is told.
    plant = (lambda row: row.draft if is_drawn(row.req) else planted(row)) if cell.is_drawn else planted
    if cell.is_updated:
        spec = cell.head_spec()
        other = tiny_heads.write_head(unspeculated.folder / f"{cell}-old", target, replace(spec, seed=spec.seed + 1))
        live = updatable(replace(cell.settings(target, other), llm=(TRANSFER,)))
        update(live, *files(head))
    else:
        live = engine(cell.settings(target, head))
    with (
        emulate(live, [1, 2, 4], sizes=(16, 48)) if graphs else nullcontext() as seen,
        record(live, plant, keep_hidden=cell.dtype == "bfloat16") as noted,
        watch_preemptions(live) as preempted,
    ):
        some = asked(cell.requests)
        finished = live.run([replace(r, sampling=TOP_1) if cell.is_drawn and is_drawn(r.id) else r for r in some])
    report = compare(noted, finished, reference, live.settings)
    print(report, seen, *report.ties, sep="\n")
    if cell.dtype == "float32":
        different = [req for req, done in finished.items() if done.output != right[req].output]
        assert not different, f"greedy output is not the unspeculated one: {different}"
    totals.report[cell.dtype] += report
    totals.rejections |= {(cell.k, refused) for refused in report.rejections}
    totals.preemptions += preempted.call_count
    totals.cached_tokens += sum(done.num_cached_tokens for done in finished.values())
    if seen:
        totals.modes += Counter(full=seen.replayed.total(), piecewise=seen.pieces.total(), eager=seen.eager)
        totals.from_graphs += report.rows


def test_totals(totals: Totals):
    assert totals.cells == {str(cell) for cell in CELLS}, "these are totals: select the cells too"
    whole = Report()
    for dtype, report in totals.report.items():
        whole += report
        print(f"{dtype}: {report}")
        assert len(report.ties) <= math.ceil(MAX_TIE_SHARE[dtype] * report.tokens)
    print(totals)
    assert whole.rows >= LEAST_ROWS
    depths = [k for k in FACTORS["k"] if k <= 8]  # too few rows for each count of more
    assert totals.rejections >= {(k, refused) for k in depths for refused in range(k + 1)}
    assert totals.preemptions > 0
    assert totals.cached_tokens > 0
    if V2:
        assert min(totals.modes[mode] for mode in ("full", "piecewise", "eager")) > 0
        assert totals.from_graphs > LEAST_SHARE_FROM_GRAPHS * whole.rows
    if not STOCK:
        assert whole.dropped["partial prefill"] > 0
        assert whole.near_end > 0
        assert whole.looked_up > LEAST_ROWS // 40
