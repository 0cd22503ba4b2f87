"""Folders of results made from a known cost model instead of servers."""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peagle_tools.bench.cells import Cell, CellResult, grid
from peagle_tools.bench.suite import Suite
from tests.bench.rawdata import raw


def result(cell: Cell, *, noise: float = 1.0, edit: Callable[[Cell, dict], None] = lambda *_: None) -> CellResult:
    """One cell; ``edit`` may change what the client wrote."""
    data = raw(cell.arm, cell.k, cell.concurrency, noise=noise)
    edit(cell, data)
    return CellResult(cell=cell, raw=data | {"texts_sha256": data.pop("generated_texts")})


def sweep(suite: Suite, gpu: str = "", dtype: str = "float32") -> dict[str, Any]:
    data = {"suite": suite.model_dump(mode="json"), "versions": {}, "prompts": {}}
    data["suite"]["serve"]["flags"] += f" --dtype {dtype}"
    return data | {"hardware": {"cpu": "a CPU, 2 cores"} | ({"gpu": gpu} if gpu else {})}


def write(
    folder: Path,
    suite: Suite,
    *,
    spread: float = 0.01,
    slower: Mapping[tuple[str, int, int], float] | None = None,
    failed: Mapping[str, str] | None = None,
    edit: Callable[[Cell, dict], None] = lambda *_: None,
    **setting: str,
) -> Path:
    """A results folder of the whole suite. ``slower`` maps (arm, K, concurrency) to a factor on time, ``failed`` cell
    ids to reasons; ``setting`` is for ``sweep``."""
    (folder / "cells").mkdir(parents=True)
    rng = random.Random(0)
    for cell in grid(suite):
        noise = 1 + rng.uniform(-spread, spread)
        noise *= (slower or {}).get((cell.arm, cell.k, cell.concurrency), 1.0)
        reason = (failed or {}).get(cell.id)
        kept = CellResult(cell=cell, reason=reason) if reason else result(cell, noise=noise, edit=edit)
        (folder / f"cells/{cell.id}.json").write_text(kept.model_dump_json())
    (folder / "sweep.json").write_text(json.dumps(sweep(suite, **setting)))
    return folder
