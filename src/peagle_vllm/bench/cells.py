"""The grid of a suite, and the order in which it is walked."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from peagle_vllm.bench.suite import Suite, slug


@dataclass(frozen=True, order=True)
class Cell:
    """One measurement: one call of ``vllm bench serve``."""

    arm: str
    k: int  # 0: no speculation
    dataset: str
    concurrency: int
    repeat: int

    @property
    def id(self) -> str:
        """Names the cell's file."""
        return f"{slug(self.arm)}-k{self.k}-{slug(self.dataset)}-c{self.concurrency}-r{self.repeat}"

    @property
    def label(self) -> str:
        depth = f" K={self.k}" if self.k else ""
        return f"{self.arm}{depth}, {self.dataset}, c={self.concurrency}, repeat {self.repeat}"


@dataclass(frozen=True)
class Session:
    """What one server start is used for: one arm at one depth, in one repeat."""

    arm: str
    k: int
    repeat: int
    cells: tuple[Cell, ...]

    @property
    def id(self) -> str:
        return f"{slug(self.arm)}-k{self.k}-r{self.repeat}"


@dataclass(frozen=True)
class Only:
    """Restricts a sweep; an empty collection restricts nothing."""

    arms: Collection[str] = ()
    k: Collection[int] = ()  # arms without speculation stay in
    concurrency: Collection[int] = ()
    repeats: int | None = None

    def admits(self, cell: Cell) -> bool:
        return (
            (not self.arms or cell.arm in self.arms)
            and (not self.k or cell.k == 0 or cell.k in self.k)
            and (not self.concurrency or cell.concurrency in self.concurrency)
        )


def sessions(suite: Suite, only: Only | None = None) -> Iterator[Session]:
    """Every server start, in order. All arms come once before any comes twice, so that a machine that slowly
    changes (heat, other users) changes all arms alike."""
    only = only or Only()
    for repeat in range(1, (only.repeats or suite.repeats) + 1):
        for name, arm in suite.arms.items():
            for k in arm.depths:
                cells = [
                    Cell(name, k, dataset, concurrency, repeat)
                    for dataset in suite.datasets
                    for concurrency in suite.concurrency
                ]
                if wanted := tuple(cell for cell in cells if only.admits(cell)):
                    yield Session(name, k, repeat, wanted)
