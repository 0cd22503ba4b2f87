"""Write the generated parts of README and docs, or check them: ``python tools/docs.py [--check] [--diagnose]``."""

import argparse
import importlib
import json
import os
import re
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
    return generated(text, "dispatches", "host_time", "traffic", "memory", "floor", "preparation")


def generated(text: str, *scripts: str) -> str:
    """``text`` with the table of each script of benchmarks/, from its committed result."""
    for name in scripts:
        result = json.loads((RESULTS / f"{name}.json").read_text())
        columns, rows, notes = importlib.import_module(f"benchmarks.{name}").published(result)
        text = between(text, name, f"{table(columns, rows)}\n\n{notes}; {_where(result, name)}")
    return text


def sharpen() -> str:
    """Gains of the tiny heads: as served, and by prompts to learn from."""
    result = json.loads((RESULTS / "sharpen.json").read_text())

    def length(gain: Sequence[float]) -> str:
        return f"{gain[0]:.2f} ± {gain[1]:.2f}"

    served, by_prompts = [], []
    for head, found in result["heads"].items():
        for one in found["served"]:
            plain, edged = found["offline"][str(one["num_speculative_tokens"])]
            before, after = one["before"], one["after"]
            gained = (f"{after[0] / before[0] - 1:+.0%}", length(one["difference"]), f"{edged[0] / plain[0] - 1:+.0%}")
            served.append((head, one["num_speculative_tokens"], length(before), length(after), *gained))
        by_prompts += [(head, f"{int(count):,}", length(gain)) for count, gain in found["by_prompts"].items()]
    columns = ["head", "K", "AL before", "AL after", "gain", "gained tokens a round", "gain estimated offline"]
    note = (
        f"{result['held_out']} held-out prompts, up to {result['max_tokens']} tokens each, greedy, {result['dtype']}, "
        f"served by vLLM; edges fitted to the answers to {result['prompts']:,} other prompts, both heads at once in "
        f"{result['minutes']:.0f} minutes (`make sharpen`). ±: one standard error."
    )
    data = table(["head", "prompts to learn from", "AL at the largest K, offline"], by_prompts)
    page = generated((ROOT / "docs/sharpen.md").read_text(), "sampling")
    return between(page, "sharpen", "\n\n".join([table(columns, served), note, data, _where(result, "sharpen")]))


def features() -> str:
    """Targets of every architecture on every arm: exact answers or rows, K = 3, 5 and 7 together, or the error."""
    result = json.loads((RESULTS / "targets.json").read_text())

    def cell(found: dict[str, str], arm: str) -> str:
        said = [text for name, text in found.items() if name.startswith(arm)]
        counted = [re.match(r"(\d+) of (\d+)( rows differ)?", text) for text in said]
        if not all(counted):
            return said[0].replace("|", "\\|")
        exact = sum(int(m[2]) - int(m[1]) if m[3] else int(m[1]) for m in counted if m)
        return f"{exact} of {sum(int(m[2]) for m in counted if m)}" if counted else ""

    arms = ("alone", "eagle3", "stock-v1", "plugin-v1", "plugin-v2")
    rows = [(name, *(cell(found, arm) for arm in arms)) for name, found in result["targets"].items()]
    columns = ("target", "no speculation, answers", "EAGLE-3, answers", "stock P-EAGLE V1, rows")
    shown = table((*columns, "plugin V1, rows", "plugin V2, rows"), rows)
    page = (ROOT / "docs/features.md").read_text()
    return between(page, "targets", f"{shown}\n\n{_where(result, 'targets')}")


def training() -> str:
    """What training costs by arithmetic; accuracy and AL of the tiny heads."""
    from benchmarks.training_cost import published

    columns, rows, notes = published()
    scripts = ("partition", "compare_heads", "mix_lengths", "train_tiny")
    page = generated((ROOT / "docs/training.md").read_text(), *scripts)
    page = between(page, "cost", f"{table(columns, rows)}\n\n{notes}.")
    results = json.loads((ROOT / "models/RESULTS.json").read_text())
    lengths: dict[str, dict[str, float]] = {}
    for arm in results["arms"]:
        lengths.setdefault(arm["head"], {})[str(arm["k"])] = arm["al"]
    marks = []
    for name, head in results["training"].items():
        if head.get("kind") == "peagle" and "init" not in head:
            of = "accuracy" if "accuracy" in head else "training_accuracy"
            shares = " ".join(f"{share:.2f}" for share in head[of]) + (", in training" if of != "accuracy" else "")
            marks.append((f"`{name}`, {head['steps']:,} steps, `models/RESULTS.json`", shares, lengths[name]))
    cells = [(what, shares, *(f"{al[k]:.2f}" if k in al else "" for k in "357")) for what, shares, al in marks]
    return between(page, "marks", table(("head", "accuracy by depth at the end", "AL, K=3", "K=5", "K=7"), cells))


def table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (columns, *rows)]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]])


def _where(result: dict, name: str) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    return f"{result['device']}; {versions}; `benchmarks/results/{name}.json`."


def seams() -> str:
    from peagle_vllm.patches import all_seams
    from peagle_vllm.patches.fingerprint import load_recorded
    from tools.seams.page import render

    return between((ROOT / "docs/ledger.md").read_text(), "ledger", render(all_seams(), load_recorded()))


def heads() -> str:
    from peagle_tools.diagnose.report import FIELDS as DIAGNOSED
    from peagle_tools.inspect.report import FIELDS as INSPECTED

    text = (ROOT / "docs/heads.md").read_text()
    for name in ("inspect", "convert"):
        text = between(text, name, session(text.split(f"<!-- {name}: begin -->")[1].split("<!--")[0]))
    text = between(text, "diagnose", DIAGNOSE_SESSION.read_text())
    text = between(text, "diagnose-faults", diagnose_faults(json.loads(DIAGNOSE_FAULTS.read_text())))
    text = between(text, "inspect-json", fields("inspect --json", INSPECTED))
    return between(text, "diagnose-json", fields("diagnose --json", DIAGNOSED))


OWN_WORDS = ("peagle-vllm: ", "error: ", "warning: ", "note: ")


def session(shown_before: str, **environment: str) -> str:
    """The commands of a session again, and what a shell on 80 columns shows for them beside a copy of models/."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"COLUMNS": "80", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TERM": "dumb"} | environment
    shown = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "models").symlink_to(ROOT / "models")
        for command in re.findall(r"^\$ (.+)$", shown_before, re.MULTILINE):
            line = command.replace("peagle-vllm", f"{sys.executable} -m peagle_tools.cli")
            done = subprocess.run(line, shell=True, cwd=folder, env=env, capture_output=True, text=True)
            errors = [row for row in done.stderr.splitlines() if row.startswith(OWN_WORDS)]  # not vLLM's log
            output = [row.rstrip() for row in [*done.stdout.splitlines(), *errors]]
            shown += [f"$ {command}", *output, *([f"(exit status {done.returncode})"] if done.returncode else []), ""]
    return "\n".join(["```console", *shown[:-1], "```"])


def diagnose_faults(result: dict) -> str:
    faults, healthy = result["faults"], result["healthy"]
    named = f"{sum(row['named'] for row in faults)} of {len(faults)} planted faults are named"
    silent = f"{sum(not row['said'] for row in healthy)} of {len(healthy)} healthy heads are called healthy"
    slowest = max(row["seconds"] for row in faults + healthy)
    said = {row["fault"]: "; ".join(row["said"]).replace("|", "\\|") or "nothing: not named" for row in faults}
    rows = [(row["fault"], said[row["fault"]], f"{row['seconds']:.0f}") for row in faults]
    first = f"On the tiny pairs {named}, and {silent}; the slowest took {slowest:.0f} s on a busy machine."
    first = f"{first} {_where(result, 'diagnose')}"
    return f"{first}\n\n{table(('planted', 'said', 'seconds'), rows)}"


def fields(command: str, described: dict[str, str]) -> str:
    """A table of the fields that a command prints as JSON."""
    rows = [(f"`{name}`", text) for name, text in described.items()]
    return f"`{command}` prints one object:\n\n{table(('field', 'what it is'), rows)}"


def models() -> str:
    """What RESULTS.json says: acceptance of every arm, what training each head took; and the sizes of the files."""
    results = json.loads((ROOT / "models/RESULTS.json").read_text())
    arms = []
    for arm in results["arms"]:
        shares = " ".join(f"{share:.2f}" for share in arm.get("acceptance", []))
        arms.append((arm["target"], arm["head"] or "none", arm["k"] or "", f"{arm['al']:.2f}", shares))
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    of = results["protocol"]
    setting = f"{of['prompts']} held-out chat prompts, at most {of['max_tokens']} tokens each, greedy, {of['dtype']}, "
    trained = []
    for name, head in results["training"].items():
        if "tflop" in head:
            counts = (f"{head['parameters']:,}", head["seen"], f"{head['tflop']:.1f}")
            trained.append((name, head["layers"], head["trained_depth"], *counts, head.get("muon_lr", 0.01)))
    sizes = {file.parent.name: file.stat().st_size for file in sorted(ROOT.glob("models/tiny-*/model.safetensors"))}
    sizes["all"] = sum(sizes.values())
    training = ("head", "layers", "trained depth", "parameters", "has seen", "TFLOP", "learning rate")
    parts = [
        table(("target", "head", "K", "AL", "acceptance per position"), arms),
        f"{setting}one thread; {versions}.",
        table(training, trained),
        table(("model", "MB"), [(name, f"{size / 1e6:.2f}") for name, size in sizes.items()]),
    ]
    page = between((ROOT / "models/README.md").read_text(), "results", "\n\n".join(parts))
    again = json.loads((RESULTS / "models.json").read_text())
    lengths = {(arm["head"], arm["k"]): arm["al"] for arm in again["arms"]}
    both = [
        (arm["head"], arm["k"], f"{arm['al']:.2f}", f"{lengths[arm['head'], arm['k']]:.2f}")
        for arm in results["arms"]
        if (arm["head"], arm["k"]) in lengths and arm["head"]
    ]
    shown = table(("head", "K", "AL in this folder", "AL built anew"), both)
    minutes = f"Built from nothing in {again['minutes']:.0f} minutes on 2 cores"
    return between(page, "anew", f"{shown}\n\n{minutes}; {_where(again, 'models')}")


GENERATED = {
    "README.md": readme,
    "docs/features.md": features,
    "docs/heads.md": heads,
    "docs/performance.md": performance,
    "docs/ledger.md": seams,
    "docs/sharpen.md": sharpen,
    "docs/training.md": training,
    "models/README.md": models,
}


def outdated() -> list[str]:
    """The files whose generated parts are not what they would be now."""
    return [name for name, make in GENERATED.items() if (ROOT / name).read_text().rstrip() != make().rstrip()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, fail when something is out of date")
    parser.add_argument("--diagnose", action="store_true", help="run the session of diagnose again (minutes)")
    args = parser.parse_args()
    if args.diagnose:  # the tiny pair with another mask token than its own
        engine = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
        quiet = {"PYTHONWARNINGS": "ignore"}
        DIAGNOSE_SESSION.write_text(session(DIAGNOSE_SESSION.read_text(), **engine, **quiet) + "\n")
    stale = outdated()
    if args.check:
        for name in stale:
            print(f"{name} is out of date: make docs", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        (ROOT / name).write_text(GENERATED[name]().rstrip() + "\n")
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
