"""Write the generated parts of README and docs, or check them: ``python tools/docs.py [--check] [--diagnose]``."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

RESULTS = ROOT / "benchmarks/results"
DEMO_RESULT = RESULTS / "demo.json"
DIAGNOSE_SESSION = RESULTS / "diagnose.md"
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
    counts, times = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("dispatches", "preparation"))
    lines = ["| arm | tensor operations | Triton launches |", "|---|---|---|"]
    for arm in counts["arms"]:
        lines.append(f"| {arm['arm']} | {arm['totals']['operations']} | {arm['totals']['launches']} |")
    lines += ["", f"K = {counts['k']}, {counts['requests']} requests; {_where(counts, 'dispatches')}"]
    text = between((ROOT / "docs/performance.md").read_text(), "dispatches", "\n".join(lines))
    lines = ["| batch | stock V1, median us | plugin V1, median us | stock / plugin |", "|---|---|---|---|"]
    for cell in times["cells"]:
        stock, plugin = (cell["median_us"][arm] for arm in ("stock V1", "plugin V1"))
        lines.append(f"| {cell['batch']} | {stock:.0f} | {plugin:.0f} | {cell['stock_over_plugin']:.2f} |")
    lines += ["", f"K = {times['k']}; {_where(times, 'preparation')}"]
    return between(text, "preparation", "\n".join(lines))


def _where(result: dict, name: str) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    return f"{result['device']}; {versions}; `benchmarks/results/{name}.json`."


def seams() -> str:
    from peagle_vllm.seams import all_seams
    from peagle_vllm.seams.fingerprint import load_recorded
    from peagle_vllm.seams.render import render

    return render(all_seams(), load_recorded())


def heads() -> str:
    from peagle_vllm.diagnose.report import FIELDS as DIAGNOSED
    from peagle_vllm.heads.report import FIELDS as INSPECTED

    text = (ROOT / "docs/heads.md").read_text()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("inspect", "convert"):
            text = between(text, name, session(Path(folder), *SESSIONS[name]))
    text = between(text, "diagnose", DIAGNOSE_SESSION.read_text())
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
    os.environ.update(engine, PYTHONWARNINGS="ignore", VLLM_CPU_KVCACHE_SPACE="1")
    with tempfile.TemporaryDirectory() as folder:
        return session(Path(folder), *SESSIONS["diagnose"])


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
