"""One page of ratios, made of the results that there are so far."""

from typing import Any

from benchmarks import draft_step, engine
from benchmarks.arms import HAS_GPU, NOT_A_GPU, table, verdict
from benchmarks.gpu_day.parts import DRAFT_ARMS, ENGINE_ARMS, OURS, Kind, Part
from benchmarks.kernels import COPY_SHARE_AIM, KERNELS, shape_name
from benchmarks.launches import as_text

Entry = dict[str, Any]
DECODES = [(k, reqs) for k in (5, 7) for reqs in (1, 64)]  # (K, B) of the kernels' bandwidth on the page

OVER = ("of stock V1", "of EAGLE-3", "of the floor")


def page(parts: list[Part], known: dict[str, Entry]) -> str:
    """The page.

    Args:
        known: entries by part name (``running.run_parts``).
    """
    entries = {part.name: known.get(part.name, {"state": "not run yet"}) | {"kind": part.kind} for part in parts}
    rest = {name: entry for name, entry in entries.items() if entry["state"] != "done"}
    host = entries.get("host", {}).get("result") or {}
    versions = ", ".join(f"{name} {version}" for name, version in host.get("versions", {}).items())
    lines = [
        f"{host.get('device', 'unknown device')}; {versions}; commit {(host.get('commit') or 'unknown')[:12]}",
        f"{len(entries) - len(rest)} of {len(entries)} parts done",
        *([] if HAS_GPU else [NOT_A_GPU]),
    ]
    for title, text in (
        ("DRAFTS AND KERNELS, EXACT", exactness(entries)),
        ("KERNELS, share of a copy's bandwidth", bandwidth(entries)),
        ("DRAFT STEP, us on the device", draft_steps(entries, host.get("bandwidth"))),
        ("ENGINE, tokens per second", engine_speeds(entries)),
        (
            "NOT DONE",
            "\n".join(": ".join([n, e["state"], *([e["error"]] if "error" in e else [])]) for n, e in rest.items()),
        ),
    ):
        if text:
            lines += ["", title, text]
    return "\n".join(lines) + "\n"


def of_kind(entries: dict[str, Entry], kind: Kind) -> list[Any]:
    """The results that there are; a part that outlasted its limit may have some."""
    return [e["result"] for e in entries.values() if e["kind"] == kind and "result" in e]


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


def bandwidth(entries: dict[str, Entry]) -> str:
    rows = []
    for result in of_kind(entries, "bandwidth"):
        for cell in result["cells"]:
            decode = cell["kind"] == "decode"
            if decode and not result["tiny"] and (cell["k"], cell["reqs"]) not in DECODES:
                continue
            shares = [cell["arms"][name]["of_copy_bandwidth"] for name in KERNELS]
            judged = not decode and not result["tiny"]
            aim = f"both aim >= {COPY_SHARE_AIM:g}: {verdict(shares[-1] >= COPY_SHARE_AIM)}" if judged else ""
            percent = (f"{share:.0%}" for share in shares)
            rows.append((shape_name(cell), *percent, f"{cell['stock_over_both']:.2f}x", aim))
    return table(("batch", *KERNELS, "stock/both", ""), rows) if rows else ""


def draft_steps(entries: dict[str, Entry], copy_bandwidth: float | None) -> str:
    cells = [cell for cells in of_kind(entries, "draft step") for cell in cells]
    rows = []
    for k, batch in sorted({(cell["k"], cell["batch"]) for cell in cells}):
        by_arm = {cell["arm"]: cell for cell in cells if (cell["k"], cell["batch"]) == (k, batch)}
        us = {arm: cell["device_us"]["median"] for arm, cell in by_arm.items()}
        over: dict[str, float] = {}
        if mine := by_arm.get(OURS):
            floor = mine["bytes"] / copy_bandwidth * 1e6 if copy_bandwidth and HAS_GPU else None
            against = dict(zip(OVER, (us.get("stock V1"), us.get("EAGLE-3 V2"), floor), strict=True))
            over = {what: us[OURS] / value for what, value in against.items() if value}
        judged = (
            f"{what} aim <= {aim:g}: {verdict(over[what] <= aim)}"
            for what, aim_batch, aim in draft_step.AIMS
            if aim_batch == batch and what in over and HAS_GPU
        )
        times = (f"{us[arm]:.1f}" if arm in us else "-" for arm in DRAFT_ARMS)
        ratios = (f"{over[what]:.2f}x" if what in over else "-" for what in OVER)
        rows.append((k, batch, *times, *ratios, as_text(mine and mine["launches"]), ", ".join(judged)))
    columns = ("K", "B", *DRAFT_ARMS, *(f"ours {what}" for what in OVER), "launches", "")
    return table(columns, rows) if rows else ""


def engine_speeds(entries: dict[str, Entry]) -> str:
    cells = engine.summed_up([cell for cells in of_kind(entries, "engine") for cell in cells])
    speeds = {(cell["arm"], cell["c"]): cell["tokens_per_second"]["median"] for cell in cells}
    counts = sorted({c for _, c in speeds})
    rows = []
    for arm in ENGINE_ARMS:
        measured = (f"{speeds[arm, c]:.1f}" if (arm, c) in speeds else "-" for c in counts)
        both = [c for c in counts if {(arm, c), (engine.OURS, c)} <= set(speeds) and arm != engine.OURS]
        rows.append((arm, *measured, " ".join(f"{speeds[engine.OURS, c] / speeds[arm, c]:.2f}x" for c in both)))
    if not cells:
        return ""
    judged = [
        f"over {r['over']}, c={r['c']}: {r['value']:.2f}x, aim >= {r['aim']:g}: {verdict(r['met'])}"
        for r in (engine.ratios(cells) if HAS_GPU else [])
    ]
    return "\n".join([table(("arm", *(f"c={c}" for c in counts), "ours over it, by c"), rows), *judged])
