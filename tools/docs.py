"""Write the generated parts of README and docs, or check them: ``python tools/docs.py [--check]``."""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

RESULTS = ROOT / "benchmarks/results"
DEMO_RESULT = RESULTS / "demo.json"


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


GENERATED = {"README.md": readme, "docs/seams.md": seams, "docs/performance.md": performance}


def outdated() -> list[str]:
    """The files whose generated parts are not what they would be now."""
    return [name for name, make in GENERATED.items() if (ROOT / name).read_text().rstrip() != make().rstrip()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, fail when something is out of date")
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
