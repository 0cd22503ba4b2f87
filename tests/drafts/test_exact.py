"""Every draft of a running engine equals the plain torch simulation, over a pairwise grid; ``make fuzz`` goes further.

The engine verifies planted drafts (``recorder.planter``), so every rejection count occurs and acceptance
does not depend on how good a random head is; the greedy output must not notice.
"""

import json
import math
import os
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from tests.conftest import ARM
from tests.drafts import grid, targets
from tests.drafts.grid import V2, Cell, pooled
from tests.support import random_heads as tiny_heads
from tests.support.engines import Engine, Finished, Request, Settings, engine, without_speculation
from tests.support.graphs import emulate
from tests.support.recorder import MAX_TIE_SHARE, Recording, Report, Row, compare, planter, record
from tests.support.reference import Reference
from tests.support.updates import TRANSFER, files, updatable, update


class Runner:
    """Targets, and their answers without speculation, are kept from one cell to the next.

    Args:
        size: output tokens of most requests.
    """

    def __init__(self, folder: Path, size: int):
        self.folder, self.size = folder, size
        self.known: dict[str, dict[str, Finished]] = {}  # answers, by target

    def run(self, cell: Cell, waves: Iterable[list[Request]]) -> Report:
        """One wave of requests after the other; AssertionError where a draft or an answer is not what it must be."""
        target, report = self._target(cell.target), Report()
        right = self._unspeculated(cell.target)
        head = tiny_heads.write_head(self.folder / str(cell), target, cell.head_spec())
        is_simulated = cell.target in grid.SIMULATED and cell.dtype == "float32"
        reference = Reference(target if cell.target in grid.SIMULATED else None, head, cell.dtype)
        planted = planter({req: done.tokens for req, done in right.items()}, tiny_heads.VOCAB)

        def plant(row: Row) -> list[int]:
            """Drafts that are drawn stay: others would not be of the distribution that the sampler is told."""
            is_drawn = cell.drafts == "probabilistic" and "temperature" in dict(right[row.req].request.sampling)
            return list(row.draft) if is_drawn else planted(row)

        live = self._start(cell, target, head)
        with emulate(live, [1, 2, 4], sizes=(16, 48), mode=cell.graphs) if cell.graphs else nullcontext() as graphs:
            for wave in waves:
                if not is_simulated:
                    live.llm.reset_prefix_cache()  # else hidden states of this wave are those of another
                preempt = patch.object(live.scheduler, "_preempt_request", wraps=live.scheduler._preempt_request)
                with record(live, plant, keep_hidden=not is_simulated) as noted, preempt as preempted:
                    finished = live.run(wave)
                assert not live.scheduler.requests, f"requests are left: {list(live.scheduler.requests)}"
                pool = live.scheduler.kv_cache_manager.block_pool
                free, whole = pool.get_num_free_blocks(), pool.num_gpu_blocks - 1  # one is the null block
                assert free == whole, f"{whole - free} blocks are not free again"
                if cell.dtype == "float32":
                    check_output(finished, right)
                rows = noted.rows
                if cell.drafts == "probabilistic":
                    noted = Recording([row for row in rows if has_one_answer(finished[row.req])], noted.hidden)
                if noted.rows or not rows:
                    report += compare(noted, finished, reference, live.settings)
                report.counts["preemptions"] += preempted.call_count
                report.counts["async waves"] += type(live.scheduler).__name__ == "AsyncScheduler"
                report.counts["aborted requests"] += sum(done.request.aborted is not None for done in finished.values())
                report.counts["cached tokens"] += sum(done.num_cached_tokens for done in finished.values())
        if graphs:
            report.counts += Counter(full=graphs.replayed.total(), piecewise=graphs.pieces.total(), eager=graphs.eager)
        shutil.rmtree(head)
        return report

    def _start(self, cell: Cell, target: Path, head: Path) -> Engine:
        if cell.weights == "loaded":
            return engine(cell.settings(target, head))
        spec = cell.head_spec()
        other = tiny_heads.write_head(self.folder / f"{cell}-old", target, replace(spec, seed=spec.seed + 1))
        settings = cell.settings(target, other)
        live = updatable(replace(settings, llm=(*settings.llm, TRANSFER)))
        update(live, *files(head))
        return live

    def _target(self, name: str) -> Path:
        folder = self.folder / name
        if not folder.exists():
            tiny_heads.write_target(folder, name) if name in grid.SIMULATED else targets.write(self.folder, name)
        return folder

    def _unspeculated(self, name: str) -> dict[str, Finished]:
        """What the target alone answers greedily to the whole pool, also to requests that will be sampled."""
        if name not in self.known:
            asked = [pooled(number, self.size) for number in range(grid.POOL)]
            greedy = [replace(r, sampling=tuple(one for one in r.sampling if one[0] != "temperature")) for r in asked]
            settings = Settings(self._target(name), max_num_seqs=16, max_model_len=grid.MAX_MODEL_LEN, kv_blocks=128)
            answers = without_speculation(settings, greedy)
            self.known[name] = {r.id: replace(answers[r.id], request=r) for r in asked}
        return self.known[name]


def has_one_answer(done: Finished) -> bool:
    """Whether neither its answer nor its drafts depend on chance."""
    sampling = done.request.sampling
    return sampling == grid.TOP_1 or "temperature" not in dict(sampling)


def check_output(finished: dict[str, Finished], right: dict[str, Finished]) -> None:
    """An answer is the unspeculated one, or where it was aborted its beginning."""
    for req, done in finished.items():
        expected = right[req].output
        if done.request.aborted is not None:
            expected = expected[: len(done.output)]
        if has_one_answer(done):
            wrong = f"{req} {done.request.sampling}: {done.output}, without speculation {expected}"
            assert done.output == expected, wrong


pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")
CELLS = grid.pairwise_cells()
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
    report = runner.run(cell, [grid.traffic(random.Random(str(cell)), cell.requests, SIZE)])
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
    for k in grid.FACTORS["k"]:
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
    cell = grid.random_cell(rng, grid.ALL_CHOICES)
    report = runner.run(cell, [grid.traffic(rng, rng.randint(4, 14), SIZE) for _ in range(3)])
    print(cell, report, sep="\n")
    if results := os.environ.get("PEAGLE_FUZZ_RESULTS"):
        seen = {"rows": report.rows, "ties": len(report.ties), "rows at max_model_len": report.near_end}
        with Path(results).open("a") as file:
            file.write(json.dumps({"arm": ARM, "seed": seed, "cell": str(cell), **seen, **report.counts}) + "\n")
