"""Write the generated parts of README and docs, or check them: ``python tools/docs.py [--check]``."""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

DEMO_RESULT = ROOT / "benchmarks/results/demo.json"
TINY_SWEEP = ROOT / "benchmarks/results/tiny-cpu"


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


def seams() -> str:
    from peagle_vllm.seams import all_seams
    from peagle_vllm.seams.fingerprint import load_recorded
    from peagle_vllm.seams.render import render

    return render(all_seams(), load_recorded())


def benchmarking() -> str:
    page = (ROOT / "docs/benchmarking.md").read_text()
    if not (TINY_SWEEP / "cells").is_dir():
        return between(page, "tiny-cpu", "No sweep is committed yet.")
    return between(page, "tiny-cpu", tiny_sweep())


def tiny_sweep() -> str:
    """Best K of the committed sweep, and what the planner says about its K=7 cells after seeing those at K=3."""
    from peagle_vllm.bench.report.write import gather, markdown_table
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


GENERATED = {"README.md": readme, "docs/seams.md": seams, "docs/benchmarking.md": benchmarking}


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
