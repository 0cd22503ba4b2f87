"""Lines that say how far a sweep is and how long it will still take."""

import statistics
import time
from collections.abc import Callable

from peagle_vllm.bench.cells import CellResult, Session


class Progress:
    """Counts cells; the time left is what the mean cell took so far, its share of server starts included."""

    def __init__(self, cells: int, say: Callable[[str], None]):
        self.cells, self.done, self._say = cells, 0, say
        self._seconds: list[float] = []
        self._last = time.monotonic()

    def skip(self, cells: int) -> None:
        """Cells that were there already."""
        self.done += cells
        self._last = time.monotonic()

    def starting(self, session: Session) -> None:
        depth = f" K={session.k}" if session.k else ""
        self._say(f"starting {session.arm}{depth}, repeat {session.repeat} ...")

    def started(self, seconds: float) -> None:
        self._say(f"  ready after {seconds:.0f} s")

    def note(self, text: str) -> None:
        self._say(f"  {text}")

    def cell_done(self, result: CellResult) -> None:
        now = time.monotonic()
        self._seconds.append(now - self._last)
        self._last, self.done = now, self.done + 1
        self._say(f"[{self.done}/{self.cells}] {result.cell.label}: {self._summary(result)}{self._left()}")

    def _summary(self, result: CellResult) -> str:
        if not result.ok:
            return f"FAILED: {result.reason}"
        text = f"{result.raw['output_throughput']:.0f} tokens/s"
        if result.drafts is not None:
            text += f", AL {result.drafts.length:.2f}"
        return text

    def _left(self) -> str:
        if self.done == self.cells:
            return ""
        seconds = statistics.mean(self._seconds) * (self.cells - self.done)
        return f"; about {seconds / 60:.0f} min left" if seconds >= 90 else f"; about {seconds:.0f} s left"

    def finished(self, failed: int) -> None:
        words = f"{failed} of {self.cells} cells failed; the same command tries them again" if failed else "all well"
        self._say(f"{self.cells} cells: {words}")
