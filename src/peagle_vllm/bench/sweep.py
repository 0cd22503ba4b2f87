"""``bench run``: walk the cells of a suite, one server an arm and depth, and keep each result as it comes.

What can go wrong, and what then happens:

    a server does not start, or ends    its cell says failed and why; the server is started again for the next
                                        cell; a server that never came up fails all cells of its session
    the client fails, requests fail     the cell says failed and why
    the sweep is ended, by whatever     cells that are whole stay; the same command goes on with the others
    a cell failed in an earlier run     it is measured again
    the disk is full, the port taken    the sweep ends with one line
"""

import contextlib
import errno
import fcntl
import shutil
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from peagle_vllm import provenance
from peagle_vllm.acceptance import from_bench_serve
from peagle_vllm.bench import BenchError
from peagle_vllm.bench.cells import (
    Cell,
    CellResult,
    Selection,
    Session,
    read_cell,
    read_sweep,
    sessions,
    write_json,
)
from peagle_vllm.bench.client import CLIENT, CellFailed, configuration, measure, without_paths, without_texts
from peagle_vllm.bench.progress import SweepProgress
from peagle_vllm.bench.server import (
    SERVER,
    Gauges,
    Server,
    ServerFailed,
    check_port,
    free_port,
    read_draft_steps,
    serve_arguments,
    serve_environment,
)
from peagle_vllm.bench.suite import Suite

MIN_FREE_BYTES = 64 << 20


@dataclass(frozen=True)
class Commands:
    """What is run; tests put stand-ins here."""

    server: list[str] = field(default_factory=lambda: list(SERVER))
    client: list[str] = field(default_factory=lambda: list(CLIENT))


class Sweep:
    """One sweep of ``suite``, which lies in ``folder``, into ``results``."""

    def __init__(
        self,
        suite: Suite,
        folder: Path,
        results: Path,
        *,
        selection: Selection | None = None,
        commands: Commands | None = None,
    ):
        self.suite, self.folder, self.results = suite, folder.resolve(), results.resolve()
        self.commands = commands or Commands()
        self.sessions = list(sessions(suite, selection))
        self.progress = SweepProgress(sum(len(session.cells) for session in self.sessions))
        self.versions, self.hardware = provenance.versions(), provenance.hardware()
        self._partial = self.results / ".partial"

    def run(self) -> int:
        """Measure every cell that is not there yet. Returns how many cells of the whole sweep failed.

        Raises:
            BenchError: the sweep cannot go on.
        """
        if not self.sessions:
            raise BenchError("nothing to measure: the options leave no cell of this suite")
        if self.suite.port is not None:
            check_port(self.suite.port)
        with _full_disk_in_one_line(self.results), self._locked(), _signals_interrupt():
            self._open()
            self.progress.begin(sum(self._done(cell) for session in self.sessions for cell in session.cells))
            with self.progress:
                failed = sum(self._session(session) for session in self.sessions)
            shutil.rmtree(self._partial, ignore_errors=True)
        self.progress.end(failed)
        return failed

    # ------------------------------------------------------------------------------ the folder

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One sweep at a time in a folder; the kernel lets go of the lock when this process ends."""
        if self.results.exists() and not self.results.is_dir():
            raise BenchError(f"{self.results.name}: results need a folder, this is a file")
        self.results.mkdir(parents=True, exist_ok=True)
        with (self.results / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BenchError(f"another sweep is writing into {self.results.name}") from None
            yield

    def _open(self) -> None:
        """Begin a sweep, or make sure that this one may go on with what is there."""
        now: dict[str, Any] = {
            "fingerprint": self.suite.fingerprint(),
            "versions": self.versions,
            "hardware": self.hardware,
            "suite": self.suite.model_dump(mode="json"),
        }
        before = read_sweep(self.results)
        if before and before["fingerprint"] != now["fingerprint"]:
            raise BenchError(
                f"{self.results.name} holds results of another suite, or of an older state of this one; "
                "name another folder with --results"
            )
        for what in ("versions", "hardware"):
            if before and before[what] != now[what]:
                changed = [key for key in {**before[what], **now[what]} if before[what].get(key) != now[what].get(key)]
                texts = [f"{key} {before[what].get(key)} -> {now[what].get(key)}" for key in changed]
                raise BenchError(
                    f"{self.results.name} was begun with other {what} ({', '.join(texts)}); "
                    "name another folder with --results"
                )
        if shutil.disk_usage(self.results).free < MIN_FREE_BYTES:
            raise OSError(errno.ENOSPC, "")
        shutil.rmtree(self._partial, ignore_errors=True)  # of a sweep that was killed
        for folder in (self._partial, self.results / "cells", self.results / "logs"):
            folder.mkdir(exist_ok=True)
        write_json(now, self.results / "sweep.json", self._partial / "sweep.json")

    def _file(self, cell: Cell) -> Path:
        return self.results / "cells" / f"{cell.id}.json"

    def _done(self, cell: Cell) -> bool:
        return self._file(cell).exists() and read_cell(self._file(cell)).ok

    # ------------------------------------------------------------------------------ one session

    def _session(self, session: Session) -> int:
        """Measure what is missing; returns how many of its cells failed."""
        missing = [cell for cell in session.cells if not self._done(cell)]
        failed = starts = 0
        while missing:
            served, came_up, starts = 0, False, starts + 1
            server = self._server(session, starts)
            try:
                self.progress.starting(session)
                with server:
                    server.wait_until_ready(self.suite.server_start_seconds)
                    came_up = True
                    self.progress.say(f"  ready after {server.start_seconds:.0f} s")
                    for cell in missing:
                        served += 1
                        failed += not self._measure(cell, server)
            except ServerFailed as error:
                if not came_up:
                    for cell in missing:
                        self._keep_failure(cell, str(error), 0.0)
                    return failed + len(missing)
                failed += 1
                if served < len(missing):
                    self.progress.say(f"  {error}; starting it again for the next cell")
            missing = missing[served:]
        return failed

    def _server(self, session: Session, start: int) -> Server:
        return Server(
            serve_arguments(self.suite, session.arm, session.k),
            serve_environment(self.suite, session.arm),
            port=self.suite.port or free_port(),
            cwd=self.folder,
            log=self._new_log(f"{session.id}-server{f'-{start}' if start > 1 else ''}"),
            command=self.commands.server,
        )

    def _new_log(self, name: str) -> Path:
        """An empty log: the reason for which an earlier run failed must not be found in it."""
        log = self.results / "logs" / f"{name}.log"
        log.write_bytes(b"")
        return log

    # ------------------------------------------------------------------------------ one cell

    def _measure(self, cell: Cell, server: Server) -> bool:
        """Whether the cell is whole. Raises ServerFailed, with the failure kept, when the server is lost with it."""
        began, gauges = datetime.now(UTC), Gauges(server)
        before = read_draft_steps(server)
        try:
            raw = measure(
                self.suite,
                cell,
                server,
                gauges,
                client=self.commands.client,
                cwd=self.folder,
                partial=self._partial,
                log=self._new_log(f"{cell.id}-client"),
            )
            after = read_draft_steps(server)
            kept = self._result(cell, server.start_seconds, began)
            result = CellResult(
                **kept,
                status="ok",
                reason="",
                drafts=from_bench_serve(raw),
                draft_steps=after.since(before) if after and before else None,
                gauges={"kv_use": gauges.kv_use, "gpu_memory_mib": gauges.gpu_memory_mib},
                raw=without_texts(raw),
            )
        except CellFailed as error:
            try:
                server.check_well()
            except ServerFailed as gone:
                self._keep_failure(cell, str(gone), server.start_seconds)
                raise
            self._keep_failure(cell, str(error), server.start_seconds)
            return False
        self._keep(result)
        self.progress.cell_done(result)
        return True

    def _result(self, cell: Cell, start_seconds: float, began: datetime) -> dict[str, Any]:
        return {
            "cell": cell,
            "kind": self.suite.arms[cell.arm].kind,
            "configuration": configuration(
                self.suite, self.folder, cell, server=self.commands.server, client=self.commands.client
            ),
            "versions": self.versions,
            "hardware": self.hardware,
            "began": began.isoformat(timespec="seconds"),
            "server_start_seconds": round(start_seconds, 2),
        }

    def _keep_failure(self, cell: Cell, reason: str, start_seconds: float) -> None:
        result = CellResult(
            **self._result(cell, start_seconds, datetime.now(UTC)), status="failed", reason=without_paths(reason)
        )
        self._keep(result)
        self.progress.cell_done(result)

    def _keep(self, result: CellResult) -> None:
        write_json(asdict(result), self._file(result.cell), self._partial / f"{result.cell.id}.json")


@contextlib.contextmanager
def _full_disk_in_one_line(results: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BenchError(
                f"no space left for {results.name}: free at least {MIN_FREE_BYTES >> 20} MiB; "
                "the same command then goes on"
            ) from None
        if error.errno in (errno.EACCES, errno.EROFS):
            raise BenchError(f"{results.name}: cannot be written ({error.strerror})") from None
        raise


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end a sweep as Ctrl-C does: through every ``finally`` that ends a process."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {sign: signal.signal(sign, interrupt) for sign in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
