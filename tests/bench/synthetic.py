"""Folders of results made from a known cost model instead of servers."""

import json
import random
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peagle_tools.bench.cells import Cell, CellResult, grid
from peagle_tools.bench.suite import Suite
from peagle_tools.shared.acceptance import from_bench_serve
from tests.bench.rawdata import raw


def result(
    suite: Suite,
    cell: Cell,
    *,
    noise: float = 1.0,
    reason: str = "",
    gpu: str = "",
    edit: Callable[[Cell, dict[str, Any]], None] = lambda *_: None,
    dtype: str = "float32",
) -> CellResult:
    """One cell; ``edit`` may change what the client wrote."""
    data = {} if reason else raw(cell.arm, cell.k, cell.concurrency, noise=noise)
    if data:
        edit(cell, data)
    return CellResult(
        cell=cell,
        reason=reason,
        configuration={
            "dataset": suite.datasets[cell.dataset].model_dump(mode="json"),
            "serve": ["--dtype", dtype, *shlex.split(suite.serve.flags)],
            "bench": ["--temperature", "0.0"],
        },
        versions={"vllm": "0.0"},
        hardware={"cpu": "a CPU, 2 cores", "system": "Linux x86_64"} | ({"gpu": gpu} if gpu else {}),
        began="2026-01-01T00:00:00+00:00",
        drafts=None if reason else from_bench_serve(data),
        raw={name: value for name, value in data.items() if name not in ("generated_texts", "errors")}
        | {"texts_sha256": data.get("generated_texts", [])},
    )


def write(
    folder: Path,
    suite: Suite,
    *,
    seed: int = 0,
    spread: float = 0.01,
    slower: Mapping[tuple[str, int, int], float] | None = None,
    failed: Mapping[str, str] | None = None,
    **more: Any,
) -> Path:
    """A results folder of the whole suite. ``slower`` maps (arm, K, concurrency) to a factor on time, ``failed`` cell
    ids to reasons; ``more`` is for ``result``."""
    (folder / "cells").mkdir(parents=True)
    rng = random.Random(seed)
    for cell in grid(suite):
        noise = 1 + rng.uniform(-spread, spread)
        noise *= (slower or {}).get((cell.arm, cell.k, cell.concurrency), 1.0)
        why = (failed or {}).get(cell.id, "")
        text = result(suite, cell, noise=noise, reason=why, **more).model_dump_json()
        (folder / f"cells/{cell.id}.json").write_text(text)
    (folder / "sweep.json").write_text(json.dumps({"suite": suite.model_dump(mode="json")}))
    return folder
