"""``bench run``: walk the cells of a suite, one server an arm and depth, and keep each result as it comes.

What can go wrong, and what then happens:

    a server does not start, or ends    its cell is kept as failed, with the reason; the server is started again for the
                                        next cell; a server that never came up fails all cells that it was started for
    the client fails, requests fail     the cell is kept as failed, with the reason
    the sweep is ended, by whatever     cells that are whole stay; the same command measures the others
    a cell failed in an earlier run     it is measured again
    the disk is full                    the sweep ends with one line
"""

import hashlib
import itertools
import json
import time
from operator import attrgetter
from pathlib import Path

from peagle_tools.bench import client
from peagle_tools.bench.cells import Cell, CellResult, read_cell, read_sweep
from peagle_tools.bench.client import CellFailed, environment, serve_arguments
from peagle_tools.bench.metrics import AL, metric
from peagle_tools.bench.suite import Suite
from peagle_tools.shared import provenance
from peagle_tools.shared.acceptance import Answer, by_repeated
from peagle_tools.shared.atomic_files import locked, write_whole
from peagle_tools.shared.errors import ToolError
from peagle_tools.shared.prompt_files import read_conversations
from peagle_tools.shared.server import Server, ServerFailed

CHANGE_NO_MEASUREMENT = {"repeats", "server_start_seconds", "cell_seconds"}  # keys of a suite


class Sweep:
    """One sweep of ``cells`` of ``suite``, whose file is in ``folder``, into ``results``."""

    def __init__(self, suite: Suite, folder: Path, results: Path, cells: list[Cell]):
        self.suite, self.cells = suite, cells
        self.folder, self.results = folder.resolve(), results.resolve()

    def run(self) -> int:
        """Measure every cell that is not there yet. Returns how many cells of the whole sweep failed.

        ToolError where the sweep cannot continue, OSError where ``results`` cannot be written.
        """
        if not self.cells:
            raise ToolError("nothing to measure: the options leave no cell of this suite")
        self.results.mkdir(parents=True, exist_ok=True)
        with locked(self.results, ToolError(f"another sweep is writing into {self.results.name}")):
            self._open()
            missing = [cell for cell in self.cells if not ((f := self._file(cell)).exists() and read_cell(f).ok)]
            self._began, self._left = time.monotonic(), len(missing)
            self._kept = self._failed = 0
            for _, group in itertools.groupby(missing, key=attrgetter("arm", "k", "repeat")):
                self._serve(list(group))
        failures = f"{self._failed} of {len(self.cells)} cells failed; the same command tries them again"
        print(f"{len(self.cells)} cells: {failures if self._failed else 'all well'}", flush=True)
        return self._failed

    def _file(self, cell: Cell) -> Path:
        return self.results / f"cells/{cell.id}.json"

    def _open(self) -> None:
        """Begin a sweep, or make sure that this one may continue what is there."""
        files = {name: self.folder / data.jsonl for name, data in self.suite.datasets.items() if data.jsonl is not None}
        for file in files.values():  # each client reads it again; here a mistake costs less
            read_conversations(file)
        now = {
            "suite": self.suite.model_dump(mode="json"),
            "versions": provenance.versions(),
            "hardware": provenance.hardware(),
            "variables": provenance.variables(),
            "prompts": {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()},
            "models": self._models(),
        }
        before = read_sweep(self.results) or now
        for what in now:
            old, new = before.get(what, now[what]), now[what]
            keys = [key for key in old | new if old.get(key) != new.get(key) and key not in CHANGE_NO_MEASUREMENT]
            if keys:
                began = f"{self.results.name} was begun with other {what} ({', '.join(keys)})"
                raise ToolError(f"{began}; name another folder with --results")
        (self.results / "cells").mkdir(exist_ok=True)
        write_whole(self.results / "sweep.json", json.dumps(now, indent=1) + "\n")

    def _models(self) -> dict[str, str]:
        """Of each model that is a folder, a hash of its files' sizes and times: another may have come to its place."""
        heads = [str((arm.speculative_config or {}).get("model", "")) for arm in self.suite.arms.values()]
        hashes = {}
        for name in {self.suite.target, *heads} - {""}:
            folder = self.folder / name
            stats = [file.stat() for file in sorted([*folder.glob("config.json"), *folder.rglob("*.safetensors")])]
            if stats:
                stamps = repr([(stat.st_size, stat.st_mtime_ns) for stat in stats])
                hashes[name] = hashlib.sha256(stamps.encode()).hexdigest()[:16]
        return hashes

    def _serve(self, missing: list[Cell]) -> None:
        """Measure cells of one arm, depth and repeat, on a further server where one has failed."""
        first = missing[0]
        arguments, env = serve_arguments(self.suite, first.arm, first.k), environment(self.suite, first.arm)
        while missing:
            lost = missing  # all of them, should this server not come up
            print(f"starting {first.drafter}, repeat {first.repeat} ...", flush=True)
            log = self.results / f"logs/{missing[0].id}-server.log"
            try:
                with Server(arguments, cwd=self.folder, env=env, log=log) as server:
                    seconds = server.wait_until_ready(self.suite.server_start_seconds)
                    print(f"  ready after {seconds:.0f} s", flush=True)
                    while missing:
                        lost = missing[:1]
                        self._keep(self._measure(missing[0], server))
                        missing = missing[1:]
            except ServerFailed as error:
                print(f"  the server failed: {error}\n  its log: {log}", flush=True)
                for cell in lost:
                    self._keep(CellResult(cell=cell, reason=str(error)))
                missing = missing[len(lost) :]

    def _measure(self, cell: Cell, server: Server) -> CellResult:
        """Raises ServerFailed when the server has failed."""
        try:
            log = self.results / f"logs/{cell.id}-client.log"
            raw = client.measure(self.suite, cell, server, cwd=self.folder, log=log)
        except CellFailed as error:
            server.check_well()  # the server's failure is the cause of the client's
            return CellResult(cell=cell, reason=str(error))
        repeated = by_repeated(Answer(*answer) for answer in raw.pop("answers", ()))
        texts = raw.pop("generated_texts")  # kept as hashes, enough to see whether two arms wrote the same
        raw["texts_sha256"] = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]
        kept = {name: value for name, value in raw.items() if name not in ("errors", "tokenizer_id")}
        return CellResult(cell=cell, repeated=repeated, raw=kept)

    def _keep(self, result: CellResult) -> None:
        """Write the result of a cell, without paths of this machine, and print a line about it."""
        reason = result.reason.replace(f"{Path.cwd()}/", "./").replace(f"{Path.home()}/", "~/")
        result = result.model_copy(update={"reason": reason})
        write_whole(self._file(result.cell), result.model_dump_json() + "\n")
        self._kept, self._left = self._kept + 1, self._left - 1
        self._failed += not result.ok
        # A mean cell of this run, its share of server starts included, gives the time left.
        minutes = (time.monotonic() - self._began) / self._kept * self._left / 60
        which = f"[{len(self.cells) - self._left}/{len(self.cells)}] {result.cell.label}, repeat {result.cell.repeat}"
        text = f"{result.raw['output_throughput']:.0f} tokens/s" if result.ok else f"FAILED: {reason}"
        text += f", AL {metric(result.raw, AL):.2f}" if AL in result.raw else ""
        print(f"{which}: {text}; about {minutes:.0f} min left", flush=True)
