"""The grid of a suite, the order in which it is walked, and what is kept of it.

RESULTS/sweep.json          the suite, versions, hardware and hashes of prompt files with which the sweep was begun
RESULTS/cells/CELL.json     one cell; there only when it is whole
RESULTS/logs/               what servers and clients wrote; not part of the result
RESULTS/report.md           made from the above, any time
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from peagle_tools.bench.suite import Suite, slug
from peagle_tools.shared.acceptance import Acceptance
from peagle_tools.shared.errors import ToolError


@dataclass(frozen=True)
class Condition:
    """What is measured; its cells are the repeats of it."""

    arm: str
    k: int  # 0: no speculation
    dataset: str
    concurrency: int

    @property
    def drafter(self) -> str:
        return f"{self.arm} K={self.k}" if self.k else self.arm

    @property
    def label(self) -> str:
        """Names the condition; repeats share it."""
        return f"{self.drafter}, {self.dataset}, c={self.concurrency}"


@dataclass(frozen=True)
class Cell(Condition):
    """One measurement: one call of ``vllm bench serve``."""

    repeat: int

    @property
    def id(self) -> str:
        """Names the cell's files."""
        return f"{slug(self.arm)}-k{self.k}-{slug(self.dataset)}-c{self.concurrency}-r{self.repeat}"


def grid(
    suite: Suite,
    *,
    arms: Collection[str] = (),
    k: Collection[int] = (),
    concurrency: Collection[int] = (),
    repeats: int | None = None,
) -> list[Cell]:
    """Every cell, in order; an empty collection restricts nothing, and ``k`` leaves arms without speculation in.

    All arms come once before any comes twice, so that a machine that slowly changes (heat, other users) changes all
    arms alike.
    """
    cells = (
        Cell(name, depth, dataset, c, repeat)
        for repeat in range(1, (repeats or suite.repeats) + 1)
        for name, arm in suite.arms.items()
        for depth in arm.k or [0]
        for dataset in suite.datasets
        for c in suite.concurrency
        if (not arms or name in arms) and (not k or depth in {0, *k}) and (not concurrency or c in concurrency)
    )
    return list(dict.fromkeys(cells))  # once, what the suite lists twice


class CellResult(BaseModel):
    """One cell. A failed one has a reason and no measurement."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")
    cell: Cell
    reason: str = ""  # why it failed
    repeated: dict[int, Acceptance] = {}  # by how many last tokens had occurred before
    # What ``vllm bench serve`` wrote, samples included; generated texts only as SHA-256.
    raw: dict[str, Any] = {}

    @property
    def ok(self) -> bool:
        return not self.reason


class Results(NamedTuple):
    """A sweep."""

    sweep: dict[str, Any]  # sweep.json
    cells: list[CellResult]  # in the order of arm (as the suite lists them), K, data set, concurrency, repeat


def read_cell(file: Path) -> CellResult:
    """Raises ToolError when the file is not what ``bench run`` wrote for a cell."""
    try:
        return CellResult.model_validate_json(file.read_bytes())
    except ValidationError:
        fix = "delete it, and the same `bench run` measures it again"
        raise ToolError(f"{file} is not a result of `bench run`; {fix}") from None


def read_results(folder: Path) -> Results:
    """All of a sweep. Raises ToolError where there is none, or it cannot be read."""
    sweep, cells = read_sweep(folder), [read_cell(file) for file in (folder / "cells").glob("*.json")]
    if not sweep or not cells:
        raise ToolError(f"{folder}: no results here (peagle-vllm bench run SUITE --results {folder})")
    arms, rest = list(sweep["suite"]["arms"]), attrgetter("k", "dataset", "concurrency", "repeat")
    if strange := {result.cell.arm for result in cells}.difference(arms):
        raise ToolError(f"{folder}: sweep.json has no arm {min(strange)}, of which cells are there; take them out")
    return Results(sweep, sorted(cells, key=lambda result: (arms.index(result.cell.arm), *rest(result.cell))))


def read_sweep(folder: Path) -> dict[str, Any]:
    """What the sweep was begun with; empty where the folder holds none."""
    file = folder / "sweep.json"
    try:
        sweep = json.loads(file.read_text()) if file.exists() else {}
        if sweep and {"suite", "versions", "hardware", "prompts"}.difference(sweep):
            raise ValueError
        return sweep
    except (ValueError, TypeError):  # a number, say
        fix = "take it from its source again, or name another folder"
        raise ToolError(f"{file}: not from `bench run`; {fix}") from None
