"""Write the generated parts of README and docs, or check them: ``python tools/docs.py [--check] [--diagnose]``."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

RESULTS = ROOT / "benchmarks/results"
DEMO_RESULT = RESULTS / "demo.json"
DIAGNOSE_SESSION = RESULTS / "diagnose.md"
DIAGNOSE_FAULTS = RESULTS / "diagnose.json"
TINY_SWEEP = RESULTS / "tiny-cpu"


def between(text: str, name: str, part: str) -> str:
    """``text`` with ``part`` between the markers ``<!-- name: begin -->`` and ``<!-- name: end -->``."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, rest = text.split(begin)
    return f"{head}{begin}\n{part.strip()}\n{end}{rest.split(end)[1]}"


def readme() -> str:
    from examples.demo.table import markdown

    table = markdown(json.loads(DEMO_RESULT.read_text()))
    source = f"`make demo` printed this (`{DEMO_RESULT.relative_to(ROOT)}` holds every sample):"
    return between((ROOT / "README.md").read_text(), "demo", f"{source}\n\n{table}")


def performance() -> str:
    text = (ROOT / "docs/performance.md").read_text()
    for name, table in (
        ("dispatches", dispatches),
        ("host_time", host_time),
        ("traffic", traffic),
        ("memory", memory),
        ("floor", floor),
        ("preparation", preparation),
    ):
        result = json.loads((RESULTS / f"{name}.json").read_text())
        text = between(text, name, f"{table(result)} {_where(result, name)}")
    return text


def dispatches(counts: dict) -> str:
    from benchmarks.dispatches import runs

    rows = [
        (what, totals["operations"], totals["launches"], totals["replays"] or "")
        for arm in counts["arms"]
        for what, totals in runs(arm)
    ]
    made = table(["arm", "tensor operations", "Triton launches", "graph replays"], rows)
    return f"{made}\n\nK = {counts['k']}, {counts['requests']} requests;"


def host_time(times: dict) -> str:
    def spread(us: dict) -> str:
        return f"{us['median']:.1f} ({us['p10']:.1f} to {us['p90']:.1f})"

    rows = []
    for cell in times["cells"]:
        ours, eagle3, computed = (cell["us"][name] for name in ("P-EAGLE", "EAGLE-3", "EAGLE-3, computed"))
        rows.append((cell["batch"], spread(ours), spread(eagle3), f"{cell['ratio']:.2f}", f"{computed['median']:.0f}"))
    made = table(["batch", "P-EAGLE, us", "EAGLE-3, us", "P-EAGLE / EAGLE-3", "EAGLE-3 with its work, us"], rows)
    cells = times["cells"]
    met = "met" if all(cell["met"] for cell in cells) else "missed"
    note = f"Medians of {times['rounds']} turns, 10th and 90th percentile in brackets. Aim: {cells[0]['aim']}, {met}."
    return f"{made}\n\n{note}\n\nK = {times['k']};"


def traffic(trace: dict) -> str:
    rows, remains = [], []
    for case in trace["cases"]:
        where = f"{case['server']}, {case['c']:,}"
        shares = (f"{share:.1%}" for share in case["share"].values())
        rows.append((where, f"{case['requests_a_step']:.0f}", *shares, f"{case['padding']:.1%}"))
        for reason, count in case["eager_reasons"].items():
            largest, ms = case["largest_piecewise_graph_rows"], case["beyond_it_ms"]
            remains.append(
                f"{where}: {count} of {case['steps']:,} steps, {reason} ({largest:,} rows), which keeps the device for "
                f"{ms:.1f} ms at least"
            )
    columns = ["server, c", "requests a step", "steps with a prefill", "full graph", "piecewise", "eager"]
    low, high = trace["prompt_tokens"]
    setting = f"prompts of {low:,} to {high:,} tokens, {trace['output_tokens']:,} output tokens"
    notes = f"What remains eager: {'; '.join(remains) or 'nothing'}.\n\n"
    notes += f"K = {trace['k']}, AL {trace['acceptance_length']:.0f}, {setting};"
    return f"{table([*columns, 'eager before', 'padding rows'], rows)}\n\n{notes}"


def memory(sizes: dict) -> str:
    rows = []
    for server in sizes["servers"]:
        graphs = f"{server['full_graphs']}, up to {server['full_graph_requests']:,} requests"
        graphs += f" | {server['piecewise_graphs']}, up to {server['piecewise_rows']:,} rows"
        sizes_mb = (f"{server[key] / 1e6:,.0f}" for key in ("buffers_bytes", "before_bytes", "largest_step_bytes"))
        rows.append((server["server"], graphs, *sizes_mb))
    columns = ["server", "full graphs", "piecewise graphs", "buffers, MB", "before, MB", "largest step, MB"]
    return f"{table(columns, rows)}\n\nK = {sizes['k']}; computed, not measured;"


def floor(result: dict) -> str:
    """One device: its K side by side; the others are in the result file."""
    from benchmarks.floor import floor_us

    device, depths = "H200", sorted({cell["k"] for cell in result["cells"]})
    cells = {(c["head"], c["step"], c["batch"], c["k"]): c for c in result["cells"]}
    batches, rows = sorted({cell["batch"] for cell in result["cells"]}), []
    for head, step in dict.fromkeys(key[:2] for key in cells):
        found = [[cells[head, step, batch, k] for k in depths] for batch in batches]
        moved = (f"{sum(row[-1]['bytes'].values()) / 1e9:.2f}" for row in found)
        us = (" / ".join(floor_us(cell["us"][device]) for cell in row) for row in found)
        rows.append((head, step, *(text for pair in zip(moved, us, strict=True) for text in pair)))
    kinds = (f"GB at K = {depths[-1]}", f"us at K = {' / '.join(map(str, depths))}")
    columns = ["head", "step", *(f"B = {batch}: {kind}" for batch in batches for kind in kinds)]
    assumed = "\n".join(f"- {name}: {text}." for name, text in (result["assumptions"] | result["sizes"]).items())
    rates = result["devices"][device]
    note = f"{device}: {rates['bandwidth'] / 1e12:g} TB/s and {rates['flops'] / 1e12:g} TFLOP/s; a star: bound by "
    note += (
        f"arithmetic, else by bytes. {result['context']:,} tokens of context, {result['kv_bytes']} bytes a number of "
    )
    edges = []
    for (head, step, batch, k), cell in cells.items():
        if (head, k) == (rows[0][0], depths[-1]) and step.startswith("edge"):
            edges.append(f"{cell['bytes']['edge'] / 1e6:.2f} MB for rank {step.split()[-1]} at B = {batch}")
    note += f"the KV cache. The edge itself moves, for {rows[0][0]} at K = {depths[-1]}: {', '.join(edges)}."
    return f"{table(columns, rows)}\n\n{note}\n\nAssumptions:\n\n{assumed}\n\nComputed, not measured;"


def preparation(times: dict) -> str:
    rows = []
    for cell in times["cells"]:
        stock, plugin = (cell["median_us"][arm] for arm in ("stock V1", "plugin V1"))
        rows.append((cell["batch"], f"{stock:.0f}", f"{plugin:.0f}", f"{cell['stock_over_plugin']:.2f}"))
    made = table(["batch", "stock V1, median us", "plugin V1, median us", "stock / plugin"], rows)
    return f"{made}\n\nK = {times['k']};"


def table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (columns, *rows)]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]])


def _where(result: dict, name: str) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    return f"{result['device']}; {versions}; `benchmarks/results/{name}.json`."


def seams() -> str:
    from peagle_vllm.seams import all_seams
    from peagle_vllm.seams.fingerprint import load_recorded
    from tools.seams.page import render

    return render(all_seams(), load_recorded())


def heads() -> str:
    from peagle_vllm.diagnose.report import FIELDS as DIAGNOSED
    from peagle_vllm.heads.report import FIELDS as INSPECTED

    text = (ROOT / "docs/heads.md").read_text()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("inspect", "convert"):
            text = between(text, name, session(Path(folder), *SESSIONS[name]))
    text = between(text, "diagnose", DIAGNOSE_SESSION.read_text())
    text = between(text, "diagnose-faults", diagnose_faults(json.loads(DIAGNOSE_FAULTS.read_text())))
    text = between(text, "inspect-json", fields("inspect --json", INSPECTED))
    return between(text, "diagnose-json", fields("diagnose --json", DIAGNOSED))


SESSIONS = {
    "inspect": (
        "peagle-vllm inspect models/tiny-llama-peagle --target models/tiny-llama",
        "peagle-vllm inspect models/tiny-llama-peagle --target models/tiny-qwen3",
    ),
    "convert": (
        "peagle-vllm convert models/tiny-llama-peagle-d2t own",
        "peagle-vllm convert own back --to speculators --target models/tiny-llama",
        "cmp own/model.safetensors back/model.safetensors && ls own",
        "peagle-vllm convert own back",
    ),
    "diagnose": (
        "peagle-vllm convert models/tiny-llama-peagle wrong --mask-token-id 300",
        'peagle-vllm diagnose --target models/tiny-llama --head wrong --engine \'{"dtype": "float32"}\'',
    ),
}


OWN_WORDS = ("peagle-vllm: ", "error: ", "warning: ", "note: ")


def session(folder: Path, *commands: str) -> str:
    """What a shell on 80 columns shows for the commands, in a folder beside which models/ stands."""
    folder.mkdir(exist_ok=True)
    if not (folder / "models").exists():
        (folder / "models").symlink_to(ROOT / "models")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"COLUMNS": "80", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TERM": "dumb"}
    shown = []
    for command in commands:
        line = command.replace("peagle-vllm", f"{sys.executable} -m peagle_vllm.cli")
        done = subprocess.run(line, shell=True, cwd=folder, env=env, capture_output=True, text=True)
        errors = [row for row in done.stderr.splitlines() if row.startswith(OWN_WORDS)]  # not vLLM's log
        output = [row.rstrip() for row in [*done.stdout.splitlines(), *errors]]
        shown += [f"$ {command}", *output, *([f"(exit status {done.returncode})"] if done.returncode else []), ""]
    return "\n".join(["```console", *shown[:-1], "```"])


def diagnose_session() -> str:
    """Runs engines: the tiny pair with another mask token than its own."""
    engine = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ.update(engine, PYTHONWARNINGS="ignore")
    with tempfile.TemporaryDirectory() as folder:
        return session(Path(folder), *SESSIONS["diagnose"])


def diagnose_faults(result: dict) -> str:
    faults, healthy = result["faults"], result["healthy"]
    named = f"{sum(row['named'] for row in faults)} of {len(faults)} planted faults are named"
    silent = f"{sum(not row['said'] for row in healthy)} of {len(healthy)} healthy heads are called healthy"
    slowest = max(row["seconds"] for row in faults + healthy)
    said = {row["fault"]: "; ".join(row["said"]).replace("|", "\\|") or "nothing: not named" for row in faults}
    rows = [f"| {row['fault']} | {said[row['fault']]} | {row['seconds']:.0f} |" for row in faults]
    first = f"On the tiny pairs {named}, and {silent}; the slowest took {slowest:.0f} s on a busy machine."
    first = f"{first} {_where(result, 'diagnose')}"
    return "\n".join([first, "", "| planted | said | seconds |", "|---|---|---|", *rows])


def fields(command: str, described: dict[str, str]) -> str:
    """A table of the fields that a command prints as JSON."""
    rows = [f"| `{name}` | {text} |" for name, text in described.items()]
    return "\n".join([f"`{command}` prints one object:", "", "| field | what it is |", "|---|---|", *rows])


def benchmarking() -> str:
    page = (ROOT / "docs/benchmarking.md").read_text()
    if not (TINY_SWEEP / "cells").is_dir():
        return between(page, "tiny-cpu", "No sweep is committed yet.")
    return between(page, "tiny-cpu", tiny_sweep())


def tiny_sweep() -> str:
    """Best K of the committed sweep, and what the planner says about its K=7 cells after seeing those at K=3."""
    from peagle_vllm.bench.report import gather, markdown_table
    from peagle_vllm.plan.fit import fit, judge

    report = gather(TINY_SWEEP)
    folder = TINY_SWEEP.relative_to(ROOT)
    parts = [f"`peagle-vllm bench run benchmarks/suites/tiny-cpu.yaml --results {folder}` measured:", report.setting]
    parts += [markdown_table(table, level=3) for table in report.best]
    if report.failures:
        parts.append("Failed: " + "; ".join(report.failures))
    lines = ["| arm | c | measured tokens/s, K=7 | predicted from K=3 | error |", "| --- | --- | --- | --- | --- |"]
    for dataset, points in report.groups.items():
        for arm in dict.fromkeys(p.arm for p in points if {3, 7} <= {q.k for q in points if q.arm == p.arm}):
            for j in judge(fit(points, arm, dataset, [3]), points):
                if j.point.k == 7:
                    measured = f"{j.point.tokens_per_second.median:.0f} | {j.predicted:.0f}"
                    lines.append(f"| {arm} | {j.point.concurrency} | {measured} | {j.error:+.0%} |")
    parts += ["The planner, shown the K=3 cells only, about the K=7 cells:", "\n".join(lines)]
    return "\n\n".join(parts)


GENERATED = {
    "README.md": readme,
    "docs/benchmarking.md": benchmarking,
    "docs/heads.md": heads,
    "docs/performance.md": performance,
    "docs/seams.md": seams,
}


def outdated() -> list[str]:
    """The files whose generated parts are not what they would be now."""
    return [name for name, make in GENERATED.items() if (ROOT / name).read_text().rstrip() != make().rstrip()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, fail when something is out of date")
    parser.add_argument("--diagnose", action="store_true", help="run the session of diagnose again (minutes)")
    if parser.parse_args().diagnose:
        DIAGNOSE_SESSION.write_text(diagnose_session() + "\n")
    stale = outdated()
    if parser.parse_args().check:
        for name in stale:
            print(f"{name} is out of date: make docs", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        (ROOT / name).write_text(GENERATED[name]().rstrip() + "\n")
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
