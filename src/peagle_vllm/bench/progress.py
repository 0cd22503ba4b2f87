"""How far a sweep is: a line for each event, and a bar with the time left below them on a terminal."""

import math

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from peagle_vllm.bench.cells import CellResult, Session


class SweepProgress(Progress):
    """Use as a context manager. A mean cell of this run, its share of server starts included, tells the time left."""

    def __init__(self, cells: int):
        columns = (TextColumn("cells"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(soft_wrap=True, highlight=False, markup=False)
        super().__init__(*columns, console=console, transient=True, speed_estimate_period=math.inf)
        self.cells = cells
        self._task = self.add_task("", total=cells)

    def begin(self, done: int) -> None:
        """Count ``done`` cells that are there already, and start the clock."""
        self.tasks[0].completed = done
        self.advance(self._task, 0)

    def say(self, text: str) -> None:
        self.console.print(text)

    def starting(self, session: Session) -> None:
        depth = f" K={session.k}" if session.k else ""
        self.say(f"starting {session.arm}{depth}, repeat {session.repeat} ...")

    def cell_done(self, result: CellResult) -> None:
        self.advance(self._task, 1)
        task = self.tasks[0]
        seconds = task.time_remaining or 0
        left = f"; about {seconds / 60:.0f} min left" if seconds >= 90 else f"; about {seconds:.0f} s left"
        number = f"[{task.completed:.0f}/{self.cells}]"
        self.say(f"{number} {result.cell.label}: {_summary(result)}{'' if task.finished else left}")

    def end(self, failed: int) -> None:
        words = f"{failed} of {self.cells} cells failed; the same command tries them again" if failed else "all well"
        self.say(f"{self.cells} cells: {words}")


def _summary(result: CellResult) -> str:
    if not result.ok:
        return f"FAILED: {result.reason}"
    text = f"{result.raw['output_throughput']:.0f} tokens/s"
    return text if result.drafts is None else f"{text}, AL {result.drafts.length:.2f}"
