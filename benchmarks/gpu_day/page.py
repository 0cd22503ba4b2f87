"""One page of ratios, made of whatever results there are so far."""

from collections.abc import Iterator
from typing import Any

from benchmarks import draft_step, engine
from benchmarks.arms import HAS_GPU
from benchmarks.gpu_day.parts import DRAFT_ARMS, ENGINE_ARMS, OURS, Kind, Part
from benchmarks.kernels import COPY_SHARE_AIM
from benchmarks.launches import shown

Entry = dict[str, Any]
SHOWN_DECODES = [(k, reqs) for k in (5, 7) for reqs in (1, 64)]  # (K, B) of the kernels' bandwidth on the page


def page(parts: list[Part], known: dict[str, Entry]) -> str:
    """The page.

    Args:
        known: entries by part name (``running.run_parts``).
    """
    entries = {part.name: known.get(part.name, {"state": "not run yet"}) | {"kind": part.kind} for part in parts}
    done = [entry for entry in entries.values() if entry["state"] == "done"]
    host = entries.get("host", {}).get("result") or {}
    lines = [
        f"{host.get('device', 'unknown device')}; "
        + ", ".join(f"{name} {version}" for name, version in host.get("versions", {}).items())
        + f"; commit {(host.get('commit') or 'unknown')[:12]}",
        f"{len(done)} of {len(entries)} parts done",
    ]
    if not HAS_GPU:
        lines.append("not a GPU result: tiny shapes on a CPU, times are the wall clock's")
    lines += ["", "DRAFTS AND KERNELS, EXACT", *exactness(entries)]
    if shares := list(bandwidth(entries)):
        lines += ["", "KERNELS, share of a copy's bandwidth", *shares]
    if steps := list(draft_steps(entries, host.get("bandwidth"))):
        lines += ["", "DRAFT STEP, us on the device", *steps]
    if engines := list(engine_speeds(entries)):
        lines += ["", "ENGINE, tokens per second", *engines]
    rest = {name: entry for name, entry in entries.items() if entry["state"] != "done"}
    if rest:
        lines += ["", "NOT DONE"]
        lines += [f"{name}: {e['state']}{': ' + e['error'] if 'error' in e else ''}" for name, e in rest.items()]
    return "\n".join(lines) + "\n"


def of_kind(entries: dict[str, Entry], kind: Kind) -> dict[str, Any]:
    """What there are of results, by part: one that outlasted its limit may have some."""
    return {name: e["result"] for name, e in entries.items() if e["kind"] == kind and "result" in e}


def exactness(entries: dict[str, Entry]) -> Iterator[str]:
    """A line for each part that compares: yes, NO, or why there is no answer."""
    for name, entry in entries.items():
        if entry["kind"] not in ("kernels", "drafts"):
            continue
        if "result" not in entry:
            yield f"{name:32} unknown"
            continue
        tests = [test for test in entry["result"].values() if test["outcome"] != "skipped"]
        passed = sum(test["outcome"] == "passed" for test in tests)
        verdict = "NO" if passed < len(tests) else "yes" if passed and entry["state"] == "done" else "unknown"
        text = f"{name:32} {verdict:8}{passed} of {len(tests)} tests"
        if entry["kind"] == "drafts":
            facts = ("rows", "ties", "steps", "replayed")
            rows, ties, steps, replayed = (sum(int(test.get(fact, 0)) for test in tests) for fact in facts)
            text += f"; {rows} rows, {ties} of them by rounding; {replayed} of {steps} steps replayed a graph"
        yield text


def bandwidth(entries: dict[str, Entry]) -> Iterator[str]:
    for result in of_kind(entries, "bandwidth").values():
        yield f"{'batch':26} {'prepare_inputs':>7} {'gather_hidden':>10} {'both':>6}   stock/both"
        for cell in result["cells"]:
            decode = cell["kind"] == "decode"
            if decode and not result["tiny"] and (cell["k"], cell["reqs"]) not in SHOWN_DECODES:
                continue
            shares = {
                name: cell["arms"][name]["of_copy_bandwidth"] for name in ("prepare_inputs", "gather_hidden", "both")
            }
            shape = f"{cell['kind']} B={cell['reqs']} K={cell['k']} d={cell['width']}"
            text = f"{shape:26} {shares['prepare_inputs']:7.0%} {shares['gather_hidden']:10.0%} {shares['both']:6.0%}"
            text += f" {cell['stock_over_both']:9.2f}x"
            judge = not decode and not result["tiny"]
            yield text + (judged("both", shares["both"], COPY_SHARE_AIM, at_least=True) if judge else "")


def judged(what: str, value: float, aim: float, at_least: bool) -> str:
    met = value >= aim if at_least else value <= aim
    return f"   {what} aim {'>=' if at_least else '<='} {aim:g}: {'met' if met else 'missed'}"


def draft_steps(entries: dict[str, Entry], copy_bandwidth: float | None) -> Iterator[str]:
    cells = [cell for cells in of_kind(entries, "draft step").values() for cell in cells]
    if not cells:
        return
    columns = " ".join(f"{arm:>15}" for arm in DRAFT_ARMS) + "  ours over: stock  EAGLE-3   floor  launches"
    yield f"{'K':>2} {'B':>3} {columns}"
    for k, batch in sorted({(cell["k"], cell["batch"]) for cell in cells}):
        by_arm = {cell["arm"]: cell for cell in cells if (cell["k"], cell["batch"]) == (k, batch)}
        times = {arm: cell["device_us"]["median"] for arm, cell in by_arm.items()}
        text = f"{k:2} {batch:3} " + " ".join(f"{times[a]:15.1f}" if a in times else f"{'-':>15}" for a in DRAFT_ARMS)
        if OURS not in times:
            yield text
            continue
        ours, mine = times[OURS], by_arm[OURS]
        floor = mine["bytes"] / copy_bandwidth * 1e6 if copy_bandwidth and HAS_GPU else None
        over = {"of stock V1": times.get("stock V1"), "EAGLE-3": times.get("EAGLE-3 V2"), "of the floor": floor}
        ratios = {what: ours / value for what, value in over.items() if value}
        text += " " * 10 + " ".join(f"{ratios[w]:7.2f}x" if w in ratios else f"{'-':>8}" for w in over)
        text += f"  {shown(mine['launches'])}"
        for what, at, aim in draft_step.AIMS:
            if at == batch and what in ratios and HAS_GPU:
                text += judged(what, ratios[what], aim, at_least=False)
        yield text


def engine_speeds(entries: dict[str, Entry]) -> Iterator[str]:
    cells = engine.summed_up([cell for cells in of_kind(entries, "engine").values() for cell in cells])
    if not cells:
        return
    speeds = {(cell["arm"], cell["c"]): cell["tokens_per_second"]["median"] for cell in cells}
    counts = sorted({c for _, c in speeds})
    yield f"{'arm':24} " + " ".join(f"{'c=' + str(c):>10}" for c in counts) + "   ours over it, by c"
    for arm in ENGINE_ARMS:
        shown_speeds = " ".join(f"{speeds[arm, c]:10.1f}" if (arm, c) in speeds else f"{'-':>10}" for c in counts)
        over = [speeds[engine.OURS, c] / speeds[arm, c] for c in counts if {(arm, c), (engine.OURS, c)} <= set(speeds)]
        yield f"{arm:24} {shown_speeds}   " + " ".join(f"{ratio:.2f}x" for ratio in over if arm != engine.OURS)
    for ratio in engine.ratios(cells) if HAS_GPU else []:
        value, aim = ratio["value"], ratio["aim"]
        yield f"over {ratio['over']}, c={ratio['c']}: {value:.2f}x" + judged("ours", value, aim, at_least=True)
