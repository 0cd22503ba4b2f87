"""The page of text that a rung ends with."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import arms
from benchmarks.parts import Part, best, logs, states
from peagle_tools.shared.provenance import output_of, provenance

Table = tuple[str, list[dict[str, Any]]]  # a heading, and cells
REHEARSAL = "A rehearsal without a GPU: tiny models, eager, on a CPU. No number here says anything about a GPU."
CLOCKS = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
# What vLLM logs of the kernels that it chose, of waits for the GPU, and of kernels compiled after its warm-up.
BACKEND = re.compile(r"\b[Uu]sing [^\n]*?\bbackend\b")
WAIT, LATE = "GPU<->CPU sync detected", re.compile(r"\w+ [\w ]+ during inference: [^\n.]*")


class Goal(NamedTuple):
    """What a ratio should be; ``value`` is None where it was not measured."""

    name: str
    relation: str  # ">=" or "<="
    bound: float
    value: float | None

    def __str__(self) -> str:
        if self.value is None:
            return f"not measured: {self.name}, {self.relation} {self.bound:g}"
        is_met = self.value >= self.bound if self.relation == ">=" else self.value <= self.bound
        return f"{'met' if is_met else 'MISSED'}: {self.name} is {self.value:.3g}, goal {self.relation} {self.bound:g}"


def having(cells: list[dict[str, Any]], column: str) -> list[dict[str, Any]]:
    return [cell for cell in cells if column in cell]


def measured(cells: list[dict[str, Any]], column: str, **where: Any) -> Any:
    """``column`` of the first cell with these values, the median of a ``summary``; None where there is none."""
    rows = (cell for cell in having(cells, column) if all(cell.get(key) == where[key] for key in where))
    value = next(rows, {column: None})[column]
    return value["median"] if isinstance(value, dict) else value


def ratio(mine: float | None, other: float | None) -> float | None:
    """None where one was not measured."""
    return mine / other if mine and other else None


def cells_of(parts: Sequence[Part], folder: Path) -> list[dict[str, Any]]:
    return [cell for part in parts if not part.runs_tests for cell in best(part, folder)]


def result(rung: Any, parts: Sequence[Part], folder: Path) -> str:
    """What is kept of a rung, a module with ``NOTES``, as JSON."""
    tests = {part.name: best(part, folder) for part in parts if part.runs_tests}
    kept = {"what": _what(rung), **provenance(), "cells": cells_of(parts, folder), "tests": tests}
    return json.dumps(kept, indent=1) + "\n"


def _what(rung: Any) -> str:
    return rung.NOTES if arms.HAS_GPU else REHEARSAL


def page(rung: Any, parts: Sequence[Part], folder: Path) -> str:
    """The goals, what was exact, tables of what there is, what vLLM's logs say, and what is not done.

    ``rung`` is a module with ``NOTES``, ``goals`` and ``tables``.
    """
    cells = cells_of(parts, folder)
    clocks = output_of("nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader")
    lines = [_what(rung), json.dumps(provenance()), f"clocks as they are ({CLOCKS}): {clocks or 'no GPU'}"]
    lines += map(str, rung.goals(cells))
    for part in (part for part in parts if part.runs_tests):
        tests = best(part, folder)
        passed = sum(test["outcome"] == "passed" for test in tests)
        rows = sum(int(test.get("rows", 0)) for test in tests)
        lines.append(f"{part.name}: {passed} of {len(tests)} tests passed, {rows} draft rows")
        lines += [f"  {test['name']}: {test['message'][:400]}" for test in tests if test["outcome"] == "failed"]
    for heading, table in rung.tables(cells):
        lines += [f"{heading}:", arms.table(table) if table else "nothing yet"]
    for part in parts:
        lines += from_log(part, folder)
    ended = {part.name: states(folder).get(part.name, {"state": "not run"}) for part in parts}
    lines += [f"not done: {name}: {entry}" for name, entry in ended.items() if entry["state"] != "done"]
    return "\n".join(lines) + "\n"


def from_log(part: Part, folder: Path) -> Iterator[str]:
    """Backends that vLLM chose, waits for the GPU and late compilations, of the part's last try."""
    text = "".join(log.read_text(errors="replace") for log in logs(part, folder)[:1])
    # Tests start several engines in one process, and vLLM keeps watching while the later ones warm up.
    notes = sorted({*BACKEND.findall(text), *(LATE.findall(text) if not part.runs_tests else ())})
    if waits := text.count(WAIT):
        notes.append(f"{waits} x {WAIT}")
    if notes:
        yield f"log of {part.name}: " + "; ".join(notes)
