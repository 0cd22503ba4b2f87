"""Write the generated tables of README and docs: ``make docs``. A test compares them."""

import json
import re

from benchmarks.arms import ROOT
from benchmarks.real import ARMS, committed
from peagle_tools.bench.report import markdown_table as table

RESULTS = ROOT / "benchmarks/results"
BATCHES = 1, 16, 64  # requests at once
WIDTH, CANDIDATES = 2880, 16  # of the kernels that are shown


def between(text: str, name: str, part: str) -> str:
    """``text`` with ``part`` between the markers ``<!-- name: begin -->`` and ``<!-- name: end -->``."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, rest = text.split(begin)
    return f"{head}{begin}\n{part.strip()}\n{end}{rest.split(end)[1]}"


def read(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def gpu_cells() -> dict[str, dict[int, dict]]:
    """Of rung 1 on a GPU, by arm and requests at once, its columns."""
    arms: dict[str, dict[int, dict]] = {}
    for cell in read("gpu/rung-1")["cells"]:
        if "arm" in cell:
            arms.setdefault(cell["arm"], {}).setdefault(cell["c"], {}).update(cell)
    return arms


def gpu() -> str:
    """Engines on a GPU, and one draft step of each at one request."""
    rows = []
    for arm, by_batch in gpu_cells().items():
        step, calls = by_batch[1], ["", "", ""]
        if "device_us" in step:
            counts = step.get("launches", {})  # of the CUDA calls, once counted under the profiler
            calls = [" + ".join(str(counts.get(key, "?")) for key in ("kernel_launches", "graph_launches", "copies"))]
            calls += [f"{step[time]['median'] / 1000:.2f} ms" for time in ("device_us", "host_us")]
        rows.append((arm, *calls, *(f"{by_batch[c]['tokens_per_second']['median']:,.0f}" for c in BATCHES)))
    columns = ("drafter, runner", "draft step: launches + graphs + copies", "on the GPU", "on the host")
    return table((*columns, *(f"tokens/s at {c}" for c in BATCHES)), rows)


def gpu_steps() -> str:
    """Draft steps on a GPU by batch."""
    rows = []
    for arm, by_batch in gpu_cells().items():
        if arm != "none":
            steps = (by_batch[c] for c in BATCHES)
            times = (" / ".join(f"{step[key]['median']:,.0f}" for key in ("device_us", "host_us")) for step in steps)
            rows.append((arm, *times, by_batch[1]["/ roofline"]))
    columns = (f"us at {c}: GPU / host" for c in BATCHES)
    return table(("drafter, runner", *columns, "GPU time over the copy roofline at 1"), rows)


def gpu_kernels() -> str:
    """Kernels on a GPU, at gpt-oss-20b's width and for a selector's candidates."""
    rows = []
    for cell in read("gpu/rung-1")["cells"]:
        share, reads = cell.get("of_copy_bandwidth"), cell.get("reads of the logits", "")
        if (share and cell["width"] == WIDTH) or cell.get("candidates") == CANDIDATES:
            shape, of_copies = f"{cell['rows']:,} x {cell['width']:,}", f"{share:.0%}" if share else ""
            rows.append((cell["kernel"], shape, cell["device_us"]["median"], of_copies, reads))
    return table(("kernel", "rows x width", "us", "of copy bandwidth", "reads of the logits"), rows)


def gpu_real() -> str:
    """Every arm on the real target on a GPU: acceptance and tokens/s on both sets; sampled requests have own rows."""
    rows: dict[str, dict] = {}
    for cell in read("gpu/rung-2")["cells"]:
        if "set" in cell:
            heat = f", temperature {cell['temperature']}" if "temperature" in cell else ""
            name = cell["arm"].replace(", sampled", "") + heat
            texts = rows.setdefault(name, {}).setdefault(cell.get("c", "AL"), [])
            texts.append(f"{cell['tokens_per_second']['median']:,.0f}" if "c" in cell else f"{cell['al']:.2f}")
    batches = 1, 8, 64, 128
    cells = [(name, *("/".join(row.get(key, ())) for key in ("AL", *batches))) for name, row in rows.items()]
    return table(("drafter", "AL", *(f"tokens/s at {c}" for c in batches)), cells)


def drafters() -> str:
    """Every arm on the real target, on a CPU."""
    rows = []
    for arm in ARMS[1:]:  # the first is none
        cells = [arm.name, arm.k]
        for cell in committed()[arm.label].values():
            text = "{al:.2f} ({al_of_prompts_that_do_not_loop:.2f})"
            gain = ", {gain:+.1%} [{gain_95[0]:+.1%}, {gain_95[1]:+.1%}]" if "gain" in cell else ""
            cells.append((text + gain).format(**cell))
        rows.append(cells)
    return table(("drafter", "K", "HumanEval: AL, gain", "MT-Bench: AL, gain"), rows)


def targets() -> str:
    """Targets of every architecture on every arm: exact rows, K = 3, 5 and 7 together, or the error."""

    def cell(outcomes: dict[str, str], arm: str) -> str:
        texts = [text for name, text in outcomes.items() if name.startswith(arm)]
        counts = [re.match(r"(\d+) of (\d+)( rows differ)?", text) for text in texts]
        if not all(counts):
            return texts[0].partition(":")[0]
        exact = sum(int(m[2]) - int(m[1]) if m[3] else int(m[1]) for m in counts if m)
        return f"{exact} of {sum(int(m[2]) for m in counts if m)}" if counts else ""

    arms = ("stock-v1", "plugin-v1", "plugin-v2")
    rows = [(name, *(cell(outcomes, arm) for arm in arms)) for name, outcomes in read("targets")["targets"].items()]
    return table(("target", "stock P-EAGLE V1, rows", "plugin V1, rows", "plugin V2, rows"), rows)


# Page -> its tables, between markers of their names.
GENERATED = {
    "README.md": [gpu],
    "docs/features.md": [targets],
    "docs/performance.md": [gpu_steps, gpu_kernels, gpu_real],
    "docs/acceptance.md": [drafters],
}


def outdated() -> dict[str, str]:
    """The pages whose tables are not what they would be now, with the right text."""
    pages: dict[str, str] = {}
    for name, makers in GENERATED.items():
        before = text = (ROOT / name).read_text()
        for make in makers:
            text = between(text, make.__name__, make())
        pages |= {name: text} if text != before else {}
    return pages


def main() -> None:
    for name, text in outdated().items():
        (ROOT / name).write_text(text)
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
