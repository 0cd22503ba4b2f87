"""One page of ratios, made of the results that there are so far."""

from typing import Any

from benchmarks import draft_step, engine, kernels, training
from benchmarks.arms import HAS_GPU, table
from benchmarks.gpu_day.parts import Kind, Part

Entry = dict[str, Any]
DECODES = (1, 2, 64)  # requests of the kernels' decode batches on the page; 2 are a rehearsal's


def page(parts: list[Part], known: dict[str, Entry]) -> str:
    """The page.

    Args:
        known: entries by part name (``running.run_parts``).
    """
    entries = {part.name: known.get(part.name, {"state": "not run yet"}) | {"kind": part.kind} for part in parts}
    rest = {name: entry for name, entry in entries.items() if entry["state"] != "done"}
    host = entries.get("host", {}).get("result") or {}
    versions = ", ".join(f"{name} {version}" for name, version in host.get("versions", {}).items())
    moving = [c for c in cells_of(entries, "bandwidth") if c["kind"] == "prefill" or c["reqs"] in DECODES]
    steps = draft_step.with_floor(cells_of(entries, "draft step"), host.get("bandwidth") if HAS_GPU else None)
    speeds = engine.summed_up(cells_of(entries, "engine"))
    trained = cells_of(entries, "training")
    not_done = (": ".join([name, e["state"], *([e["error"]] if "error" in e else [])]) for name, e in rest.items())
    sections = {
        "DRAFTS AND KERNELS, EXACT": exactness(entries),
        "KERNELS": moving and kernels.page(moving),
        "DRAFT STEP": steps and draft_step.page(steps),
        "ENGINE": speeds and engine.page(speeds),
        "TRAINING": trained and training.page(trained),
        "NOT DONE": "\n".join(not_done),
    }
    lines = [
        f"{host.get('device', 'unknown device')}; {versions}; commit {(host.get('commit') or 'unknown')[:12]}",
        f"{len(entries) - len(rest)} of {len(entries)} parts done",
        *(f"\n{title}\n{text}" for title, text in sections.items() if text),
    ]
    return "\n".join(lines) + "\n"


def cells_of(entries: dict[str, Entry], kind: Kind) -> list[Any]:
    """The cells that there are; a part that outlasted its limit may have some."""
    results = [e["result"] for e in entries.values() if e["kind"] == kind and "result" in e]
    return [cell for result in results for cell in (result["cells"] if kind == "bandwidth" else result)]


def exactness(entries: dict[str, Entry]) -> str:
    """A line for each part that compares: yes, NO, or unknown."""
    rows = []
    for name, entry in entries.items():
        if entry["kind"] not in ("kernels", "drafts"):
            continue
        tests = [test for test in entry.get("result", {}).values() if test["outcome"] != "skipped"]
        passed = sum(test["outcome"] == "passed" for test in tests)
        answer = "NO" if passed < len(tests) else "yes" if passed and entry["state"] == "done" else "unknown"
        text = f"{passed} of {len(tests)} tests"
        if entry["kind"] == "drafts" and tests:
            facts = ("rows", "ties", "steps", "replayed")
            num_rows, ties, steps, replayed = (sum(int(test.get(fact, 0)) for test in tests) for fact in facts)
            text += f"; {num_rows} rows, {ties} of them by rounding; {replayed} of {steps} steps replayed a graph"
        rows.append((name, answer, text if tests else ""))
    return table(("part", "exact", "tests"), rows)
