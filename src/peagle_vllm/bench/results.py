"""What is kept: a folder with one JSON file a cell. The only format of results in this project's sweeps.

RESULTS/sweep.json          the suite, versions and hardware with which the sweep was begun
RESULTS/cells/CELL.json     one cell; there only when it is whole
RESULTS/logs/               what servers and clients wrote; not part of the result
RESULTS/report.md|html      made from the above, any time
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from peagle_vllm.acceptance import Acceptance
from peagle_vllm.bench.cells import Cell
from peagle_vllm.bench.errors import BenchError

FORMAT = "peagle-vllm bench cell 1"
SAMPLES = ("ttfts", "itls", "latencies", "start_times")  # seconds; written to the microsecond


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

    @property
    def ok(self) -> bool:
        return self.status == "ok"


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


def as_json(result: CellResult) -> dict[str, Any]:
    return {"format": FORMAT, **asdict(result)}


def read_cell(file: Path) -> CellResult:
    """Raises BenchError when the file is no cell."""
    try:
        data = json.loads(file.read_text())
        if data.pop("format") != FORMAT:
            raise ValueError("another format")
        drafts = data.pop("drafts")
        if drafts is not None:
            drafts = Acceptance(**drafts | {"accepted_per_position": tuple(drafts["accepted_per_position"])})
        steps = data.pop("draft_steps", None)  # older cells have none
        steps = steps and DraftSteps(**steps)
        return CellResult(cell=Cell(**data.pop("cell")), drafts=drafts, draft_steps=steps, **data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BenchError(f"{file}: no cell of a sweep ({error}); delete it and run the sweep again") from None


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
