"""Randomised engines, by seed: drafts must be the simulation's, row by row, and greedy output that without speculation.

    PEAGLE_TEST_ARM=plugin-v1 python -m tests.drafts.fuzz --rows 20000   # on from the seed after the file's last one
    PEAGLE_TEST_ARM=plugin-v1 python -m tests.drafts.fuzz --seed 123     # that seed again

Results add up in a file. A seed that fails stays in it until it passes.
"""

import argparse
import copy
import itertools
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.conftest import ARM
from tests.drafts.configurations import SIMULATED, Configuration, draw, write
from tests.drafts.grid import MAX_MODEL_LEN
from tests.support import random_heads as tiny_heads
from tests.support.engines import (
    Engine,
    Finished,
    Request,
    Settings,
    engine,
    shut_down,
    watch_preemptions,
    without_speculation,
)
from tests.support.graphs import emulate
from tests.support.recorder import Recording, Report, compare, planter, record
from tests.support.reference import Reference
from tools.interpreter import torch_twins

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "fuzz.json"
EMPTY: dict[str, Any] = {"seeds": 0, "rows": 0, "differences": {}}  # of one arm


@dataclass
class Seen:
    """What one seed showed."""

    report: Report = field(default_factory=Report)
    counts: Counter[str] = field(default_factory=Counter)


class Fuzzer:
    """Runs seeds; targets and unspeculated answers are kept from one to the next."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.known: dict[tuple[str, str], Finished] = {}  # unspeculated answers, by target and request

    def run(self, seed: int, waves: int | None = None) -> Seen:
        """One seed's engine and its traffic, or only the first waves of it.

        Raises:
            AssertionError: a draft or an answer is another than it must be, or something is left in the engine.
            Exception: whatever ended the engine.
        """
        configuration = draw(seed)
        configuration = replace(configuration, waves=configuration.waves[:waves])
        folders = write(configuration, self.folder)
        try:
            return self._run(configuration, *folders)
        finally:
            shutil.rmtree(folders[1])

    def _run(self, configuration: Configuration, target: Path, head: Path) -> Seen:
        right = self._unspeculated(target, [request for wave in configuration.waves for request in wave])
        simulated = configuration.target in SIMULATED and configuration.settings.dtype == "float32"
        reference = Reference(target if configuration.target in SIMULATED else None, head, configuration.settings.dtype)
        plant = planter({req: done.tokens for req, done in right.items()}, tiny_heads.VOCAB)
        live, seen = engine(replace(configuration.settings, target=target, head=head)), Seen()
        with (
            nullcontext() if configuration.kernels else torch_twins(),
            emulate(live, **configuration.graphs) if configuration.graphs else nullcontext() as graphs,
        ):
            for wave in configuration.waves:
                if not simulated:
                    live.llm.reset_prefix_cache()  # else hidden states of this wave are those of another
                with record(live, plant, keep_hidden=not simulated) as noted, watch_preemptions(live) as preempted:
                    finished = live.run(wave)
                check_nothing_is_left(live)
                if "draft_sample_method" in dict(configuration.settings.speculative):
                    noted = greedy_rows(noted, finished)
                if configuration.settings.dtype == "float32":
                    check_output(finished, right)
                seen.report += compare(noted, finished, reference, live.settings)
                seen.counts["preemptions"] += preempted.call_count
                seen.counts["requests"] += len(wave)
                seen.counts["aborted requests"] += sum(
                    not done.raw or not done.raw.finished for done in finished.values()
                )
                seen.counts["cached tokens"] += sum(done.num_cached_tokens for done in finished.values())
        seen.counts["replayed graphs"] += graphs.replayed.total() + graphs.pieces.total() if graphs else 0
        return seen

    def _unspeculated(self, target: Path, requests: Iterable[Request]) -> dict[str, Finished]:
        """Greedy answers of the target alone, also to requests that will be sampled; V1 is faster with them."""
        asked = {}
        for request in requests:
            sampling = tuple((key, value) for key, value in request.sampling if key != "temperature")
            asked[request.id] = replace(request, arrives=0, aborted=None, sampling=sampling)
        missing = [request for request in asked.values() if (target.name, request.id) not in self.known]
        if missing:
            settings = Settings(target, max_num_seqs=16, max_model_len=MAX_MODEL_LEN, kv_blocks=128)
            self.known |= {(target.name, req): done for req, done in without_speculation(settings, missing).items()}
        return {req: self.known[target.name, req] for req in asked}


def is_greedy(request: Request) -> bool:
    return not dict(request.sampling).get("temperature")


def greedy_rows(noted: Recording, finished: dict[str, Finished]) -> Recording:
    """Without the rows of sampled requests, whose drafts are drawn, too."""
    return replace(noted, rows=[row for row in noted.rows if is_greedy(finished[row.req].request)])


def check_output(finished: dict[str, Finished], right: dict[str, Finished]) -> None:
    """A greedy answer is the unspeculated one, or where it was aborted its beginning."""
    for req, done in finished.items():
        expected = right[req].output
        if done.request.aborted is not None:
            expected = expected[: len(done.output)]
        if is_greedy(done.request):
            wrong = f"{req} {done.request.sampling}: {done.output}, without speculation {expected}"
            assert done.output == expected, wrong


def check_nothing_is_left(live: Engine) -> None:
    """No request and no block is in use once all requests have finished."""
    assert not live.scheduler.requests, f"requests are left: {list(live.scheduler.requests)}"
    pool = live.scheduler.kv_cache_manager.block_pool
    free, whole = pool.get_num_free_blocks(), pool.num_gpu_blocks - 1  # one is the null block
    assert free == whole, f"{whole - free} blocks are not free again"


def add(results: Path, seed: int, seen: Seen, error: str | None) -> None:
    """Add one seed to this arm's part of the file, or that it failed."""
    whole = json.loads(results.read_text()) if results.exists() else {}
    mine = whole[ARM] = copy.deepcopy(EMPTY) | whole.get(ARM, {})
    mine["differences"].pop(str(seed), None)
    mine["seeds"] = max(mine["seeds"], seed + 1)
    if error:
        mine["differences"][str(seed)] = error
    report = seen.report
    counts = {"rows": report.rows, "draft tokens": report.tokens, "ties": len(report.ties)}
    for name, number in (counts | {"rows next to max_model_len": report.near_end, **seen.counts}).items():
        mine[name] = mine.get(name, 0) + number
    results.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows_now = 1000 if ARM == "plugin-v2" else 10_000
    parser.add_argument("--rows", type=int, default=rows_now, help="rows to compare now (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="run this seed alone; its rows are added if it failed before")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    mine = EMPTY | (json.loads(args.results.read_text()).get(ARM, {}) if args.results.exists() else {})
    first = mine["seeds"] if args.seed is None else args.seed
    counts = args.seed is None or str(args.seed) in mine["differences"]
    rows, failed = 0, 0
    with tempfile.TemporaryDirectory(prefix="peagle-fuzz-") as folder:
        fuzzer = Fuzzer(Path(folder))
        for seed in itertools.count(first):
            began, seen, error = time.monotonic(), Seen(), None
            try:
                seen = fuzzer.run(seed)
            except Exception as problem:
                error = f"{type(problem).__name__}: {problem}".splitlines()[0]
                traceback.print_exc(limit=-3)
                print(f"seed {seed} FAILED; again: PEAGLE_TEST_ARM={ARM} python -m tests.drafts.fuzz --seed {seed}")
                print(replace(draw(seed), waves=()))
                failed += 1
                shut_down()
            rows += seen.report.rows
            print(f"{ARM} seed {seed}: {seen.report} in {time.monotonic() - began:.1f} s", flush=True)
            if counts:
                add(args.results, seed, seen, error)
            if args.seed is not None or rows >= args.rows:
                break
    shut_down()
    print(f"{ARM}: {rows} rows, {failed} seeds with differences; {args.results} holds what adds up")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
