"""The grid of a suite, the order in which it is walked, and what is kept of each cell.

RESULTS/sweep.json          the suite, versions and hardware with which the sweep was begun
RESULTS/cells/CELL.json     one cell; there only when it is whole
RESULTS/logs/               what servers and clients wrote; not part of the result
RESULTS/report.md|html      with plots/*.svg; made from the above, any time
"""

import json
import os
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from peagle_vllm.acceptance import Acceptance
from peagle_vllm.bench import BenchError
from peagle_vllm.bench.suite import Suite, slug

SAMPLES = ("ttfts", "itls", "latencies", "start_times")  # seconds; written to the microsecond


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
class Selection:
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


def sessions(suite: Suite, selection: Selection | None = None) -> Iterator[Session]:
    """Every server start, in order. All arms come once before any comes twice, so that a machine that slowly
    changes (heat, other users) changes all arms alike."""
    selection = selection or Selection()
    for repeat in range(1, (selection.repeats or suite.repeats) + 1):
        for name, arm in suite.arms.items():
            for k in arm.depths:
                cells = [
                    Cell(name, k, dataset, concurrency, repeat)
                    for dataset in suite.datasets
                    for concurrency in suite.concurrency
                ]
                if wanted := tuple(cell for cell in cells if selection.admits(cell)):
                    yield Session(name, k, repeat, wanted)


@dataclass(frozen=True)
class DraftSteps:
    """The server's own ``vllm:peagle_draft_*`` counters, as they grew while the cell ran, its warm-up included.

    Attributes:
        graph, piecewise, eager: steps by how the drafter ran.
        rows: rows of requests in all draft batches.
        padding_rows: rows that were computed beside them.
    """

    graph: int = 0
    piecewise: int = 0
    eager: int = 0
    rows: int = 0
    padding_rows: int = 0

    def since(self, before: "DraftSteps") -> "DraftSteps":
        old = asdict(before)
        return DraftSteps(**{name: count - old[name] for name, count in asdict(self).items()})

    @property
    def eager_share(self) -> float:
        """Eager steps / all steps; 0 without any."""
        return self.eager / max(1, self.graph + self.piecewise + self.eager)


@dataclass(frozen=True)
class CellResult:
    """One cell. A failed one has a reason and no measurement.

    Attributes:
        kind: none, EAGLE-3, P-EAGLE or other.
        raw: what ``vllm bench serve`` wrote, samples included; generated texts only as SHA-256.
        gauges: samples of kv_use (0..1) and gpu_memory_mib.
    """

    cell: Cell
    kind: str
    status: Literal["ok", "failed"]
    reason: str
    configuration: dict[str, Any]
    versions: dict[str, str]
    hardware: dict[str, str]
    began: str
    server_start_seconds: float
    drafts: Acceptance | None = None
    draft_steps: DraftSteps | None = None
    gauges: dict[str, list[float]] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    format: Literal["peagle-vllm bench cell 1"] = "peagle-vllm bench cell 1"

    @property
    def ok(self) -> bool:
        return self.status == "ok"


_CELL_RESULT = TypeAdapter(CellResult)


def write_json(data: dict[str, Any], file: Path, partial: Path) -> None:
    """Write whole or not at all: into ``partial``, then renamed."""
    with partial.open("w") as out:
        out.write(_lines(data) + "\n")
        out.flush()
        os.fsync(out.fileno())
    partial.replace(file)


def _lines(data: dict[str, Any], indent: str = " ") -> str:
    """JSON with one key a line, lists of samples on theirs: readable, and no larger than need be."""
    parts = []
    for key, value in data.items():
        deeper = isinstance(value, dict) and value
        text = _lines(value, indent + " ") if deeper else json.dumps(value, separators=(", ", ": "))
        parts.append(f"{indent}{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + f"\n{indent[:-1]}}}"


def read_cell(file: Path) -> CellResult:
    """Raises BenchError when the file is no cell; the message says which of its entries is wrong."""
    try:
        return _CELL_RESULT.validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
    except OSError as failure:
        reason = failure.strerror or str(failure)
    raise BenchError(f"{file}: no cell of a sweep ({reason}); delete it and run the sweep again")


def read_results(folder: Path) -> list[CellResult]:
    """All cells of a sweep, in the order of arm, K, data set, concurrency, repeat as the suite lists them.

    Raises:
        BenchError: there are none, or one cannot be read.
    """
    files = sorted((folder / "cells").glob("*.json"))
    if not files:
        raise BenchError(f"{folder}: no results here (peagle-vllm bench run SUITE --results {folder})")
    found = [read_cell(file) for file in files]
    order = {name: i for i, name in enumerate(read_sweep(folder).get("suite", {}).get("arms", {}))}
    return sorted(
        found,
        key=lambda r: (
            order.get(r.cell.arm, len(order)),
            r.cell.arm,
            r.cell.k,
            r.cell.dataset,
            r.cell.concurrency,
            r.cell.repeat,
        ),
    )


def read_sweep(folder: Path) -> dict[str, Any]:
    """What the sweep was begun with; empty where the folder holds none."""
    file = folder / "sweep.json"
    try:
        data = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BenchError(f"{file}: cannot be read ({error})") from None
    return data if isinstance(data, dict) else {}
