"""Write the generated tables of README and docs, or check them: ``python tools/docs.py [--check]``."""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from operator import itemgetter
from pathlib import Path

from matplotlib.axes import Axes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.arms import ROOT
from benchmarks.host import REQUESTS, K
from benchmarks.real import PLAIN, TIMED_K, best_arms
from peagle_tools.bench.plots import draw

RESULTS = ROOT / "benchmarks/results"
HEADS = {"peagle": "P-EAGLE", "peagle-plain": "P-EAGLE without selector"}
TITLES = {"humaneval": "HumanEval", "mt-bench": "MT-Bench"}  # of the sets, in the order of the results
SEEDS = {"": "models/real/{}/training.json", ", second seed": "models/real/second-seed/{}.json"}


def between(text: str, name: str, part: str) -> str:
    """``text`` with ``part`` between the markers ``<!-- name: begin -->`` and ``<!-- name: end -->``."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, rest = text.split(begin)
    return f"{head}{begin}\n{part.strip()}\n{end}{rest.split(end)[1]}"


def table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (columns, *rows)]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]])


def read(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def where(result: dict, name: str) -> str:
    """The file, which names machine and versions; these too, where they are not those of README's table."""
    known = read("real")
    if name != "real" and all(result[key] == known[key] for key in ("device", "versions")):
        return f"`benchmarks/results/{name}.json`."
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    return f"{result['device']}; {versions}; `benchmarks/results/{name}.json`."


def shown(name: str, columns: Sequence[object], rows: Iterable[Iterable[object]], note: str) -> str:
    """A table of a result file, a note on it, and where it is from."""
    return f"{table(columns, rows)}\n\n{note} {where(read(name), name)}"


def answer(result: dict) -> str:
    """How long an answer may be."""
    first, *others = result["max_tokens"].items()
    more = [f"{number} on {TITLES[name]}" for name, number in others if number != first[1]]
    return f"up to {first[1]} tokens an answer" + (f" on {TITLES[first[0]]}, {', '.join(more)}" if more else "")


def times(found: dict) -> dict[str, str]:
    """By requests in flight, tokens/s against no speculation."""
    return {n: f"{one['median']:.2f}x" for n, one in found.get("times_no_speculation", {}).items()}


def real() -> str:
    """Every drafter on the real target, at the fastest K."""
    rows, columns = [], ["drafter", "K"]
    for row in best_arms():
        k, cells = row["arm"]["k"], [row["arm"]["name"], row["arm"]["k"] or ""]
        for found in row["sets"].values():
            cells += [length(found) if k else "1", times(found)["1"], times(found)["8"]]
        rows.append(cells)
    for title in TITLES.values():
        columns += [f"{title}: AL [95%]", "tokens/s, 1 in flight", "8 in flight"]
    settings = read("real")["settings"]
    timed = settings["timed"]
    several = ", ".join(f"{name} at K = {ks[0]} and {ks[1]}" for name, ks in TIMED_K.items() if len(ks) > 1)
    prompts = " and ".join(f"{row['sets'][name]['prompts']} prompts of {title}" for name, title in TITLES.items())
    note = (
        f"SmolLM2-135M-Instruct, {settings['engine']['dtype']}, greedy. AL: acceptance "
        f"length, bonus token included, over {prompts}, {answer(settings)}. tokens/s: "
        f"times those of no speculation, {timed['prompts']} prompts of up to {timed['max_tokens']} tokens, "
        f"{timed['threads']} threads, median of {timed['repeats']} interleaved runs. Timed were {several}, of "
        "which the faster K over both sets at 1 in flight is shown."
    )
    return shown("real", columns, rows, note)


def drafters() -> str:
    """Every arm on the real target."""
    rows = []
    for row in read("real")["arms"][1:]:  # the first is none
        cells = [row["arm"]["name"], row["arm"]["k"]]
        for found in row["sets"].values():
            base = found["over"].get(PLAIN) or found["over"].get("P-EAGLE")  # EAGLE-3's is among the aims
            gained = f", {gain(base)}" if base else ""
            unlooped = f"{found['al']:.2f} ({found['al_of_prompts_that_do_not_loop']:.2f})"
            cells += [f"{unlooped}{gained}", " ".join(times(found).values())]
        rows.append(cells)
    columns = ("drafter", "K", "HumanEval: AL, gain", "tokens/s", "MT-Bench: AL, gain", "tokens/s")
    loops = " and ".join(str(found["prompts_that_loop"]) for found in row["sets"].values())
    note = (
        f"In brackets without the {loops} prompts with an answer that ends in a loop. Gain, paired: of a selector over "
        "the head trained without, of look-up over P-EAGLE. tokens/s: 1, 4 and 8 in flight. Else as in README;"
    )
    return f"{table(columns, rows)}\n\n{note} `benchmarks/results/real.json`."


def targets() -> str:
    """Targets of every architecture on every arm: exact rows, K = 3, 5 and 7 together, or the error."""
    result = read("targets")

    def cell(found: dict[str, str], arm: str) -> str:
        said = [text for name, text in found.items() if name.startswith(arm)]
        counted = [re.match(r"(\d+) of (\d+)( rows differ)?", text) for text in said]
        if not all(counted):
            return f"{said[0].partition(':')[0]}"
        exact = sum(int(m[2]) - int(m[1]) if m[3] else int(m[1]) for m in counted if m)
        return f"{exact} of {sum(int(m[2]) for m in counted if m)}" if counted else ""

    arms = ("stock-v1", "plugin-v1", "plugin-v2")
    rows = [(name, *(cell(found, arm) for arm in arms)) for name, found in result["targets"].items()]
    columns = ("target", "stock P-EAGLE V1, rows", "plugin V1, rows", "plugin V2, rows")
    return shown("targets", columns, rows, "Errors in full:")


def host() -> str:
    """What each arm dispatches, as it is and with graphs that are replayed."""
    result, counts = read("host"), []
    for arm in (arm for arm in result["arms"] if "reduced" not in arm["arm"]):
        for name, run in ((arm["arm"], arm), (f"{arm['arm']}, replayed", arm.get("replayed"))):
            if run:
                totals = run["totals"]
                counts.append((name, totals["operations"], totals["launches"], totals["replays"] or ""))
    columns = ("arm", "tensor operations", "Triton launches", "graph replays")
    return shown("host", columns, counts, f"K = {K}, {REQUESTS} requests.")


def lookup() -> str:
    """Acceptance without look-up, and what look-up adds, by set and temperature."""
    settings, *cells = map(json.loads, (RESULTS / "lookup.jsonl").read_text().splitlines())
    numbers = [key for key in cells[0] if key.startswith("from ")]
    rows = [
        (cell["set"], cell["temperature"], f"{cell['without']['al']:.2f}", *(gain(cell[number]) for number in numbers))
        for cell in cells
    ]
    columns = ("prompts", "temperature", "AL without", *(f"{number} tokens on" for number in numbers))
    sizes = f"K = {settings['settings']['k']}, {cells[0]['prompts']} prompts of each set"
    note = f"{sizes}; gains paired by prompt. `benchmarks/results/lookup.jsonl`."
    return f"{table(columns, rows)}\n\n{note}"


def structured() -> str:
    """Acceptance under a JSON schema on the real target."""
    result, rows = read("structured"), []
    titles = {"free": "free text", "stated": "JSON asked for", "structured": "JSON asked for and enforced"}
    for arm, (case, title) in product(result["arms"], titles.items()):
        found = arm[case]
        shares = " ".join(f"{100 * share:.0f}" for share in found["acceptance"])
        more = gain(found) if "gain" in found else ""
        rows.append((arm["arm"]["name"], title, length(found), more, shares, f"{found['cut']:.0%}"))
    columns = ("drafter", "answers", "AL [95%]", "gain, paired", "accepted at position 1..K, %", "draft tokens cut")
    note = (
        f"SmolLM2-135M-Instruct, greedy, {found['prompts']} prompts of MT-Bench, up to {result['max_tokens']} tokens "
        f"an answer, K = {arm['arm']['k']}. Gain: by the selector. Cut: draft tokens that vLLM drops because the "
        "grammar forbids them."
    )
    return shown("structured", columns, rows, note)


def limits() -> str:
    """Acceptance of probabilistic drafts within the request's limits on the real target, and beside them."""
    result, rows = read("limits"), []

    def al(cell: dict) -> str:
        before = f"{cell['temperature_only']['al']:.2f} → " if "gain" in cell else ""
        more = f", {gain(cell)}" if "gain" in cell else ""
        more += f" ({gain(cell['over_eagle3'])})" if "over_eagle3" in cell else ""
        return f"{before}{cell['within_limits']['al']:.2f}{more}"

    for drafter in result["drafters"]:
        cells = drafter["cells"]
        for one, other in zip(cells[::2], cells[1::2], strict=True):  # a pair of sets
            requests = ", ".join(f"{key} {value}" for key, value in one["sampling"].items())
            rows.append((drafter["name"], requests, al(one), al(other)))
    note = (
        f"AL of SmolLM2-135M-Instruct, K = {result['k']}, {result['prompts']} prompts of each set, up to "
        f"{result['max_tokens']} tokens an answer, without seeds. "
        "In brackets: over EAGLE-3's drafts, paired by prompt."
    )
    columns = ("drafter", "requests", "HumanEval: by temperature only → within the limits", "MT-Bench")
    return shown("limits", columns, rows, note)


def long_prompts() -> str:
    """Acceptance by the prompt's length, with windows, look-up and n-gram."""
    result, rows = read("long_prompts"), []
    for row in result["arms"]:
        arm, found = row["arm"], row["by_prompt_tokens"]
        name = f"{arm['name']}, window {arm['window']}" if arm["window"] else f"{arm['name']}, K = {arm['k']}"
        rows.append((name, *(f"{of['al']:.2f}" + (f" ({gain(of)})" if "gain" in of else "") for of in found.values())))
    note = f"AL (against the first row, 95% interval), {result['files']} files of Python's standard library, cut to "
    note += f"so many tokens, and a question; greedy, {result['answer']} tokens an answer."
    return shown("long_prompts", ("drafter", *found), rows, note)


def trained(head: str, seed: str = "") -> dict:
    """How a head of the real target was trained."""
    return json.loads((ROOT / SEEDS[seed].format(head)).read_text())


def learning() -> dict[str, dict[int, float]]:
    """Of each P-EAGLE head of the real target, AL at K = 3 by tokens seen, of its sittings one after the other."""
    found: dict[str, dict[int, float]] = {}
    for (head, name), seed in product(HEADS.items(), SEEDS):
        report, before = trained(head, seed), 0
        found[name + seed] = {}
        for sitting in filter(None, (report.get("first"), report)):
            _, step, optimizer, *_ = sitting["settings"]
            rows = (row for row in sitting["al"] if row["K"] == 3 and row["how"] == "replay")
            found[name + seed] |= {before + row["step"] * step["tokens"]: row["al"] for row in rows}
            before += optimizer["steps"] * step["tokens"]
    return found


def percent(shares: list[float]) -> str:
    """Shares of the first four depths or positions."""
    return ", ".join(f"{share:.0%}" for share in shares[:4])


def recipe() -> str:
    """What the heads of the real target learned, by tokens, and how long that took."""
    series, rows, second = learning(), [], trained("peagle", ", second seed")
    first, *_, last = second["log"]
    seconds = (last["time"] - first["time"]) / (last["step"] - first["step"]) / second["settings"][1]["tokens"]
    for tokens in sorted(set().union(*series.values())):
        cells = (f"{found[tokens]:.3f}" if tokens in found else "" for found in series.values())
        rows.append((f"{tokens / 1e6:.2f} million", round(tokens * seconds / 60), *cells))
    files = ", ".join(f"`{file.format('*')}`" for file in SEEDS.values())
    note = "AL by replay of each sitting's held-out answers, K = 3; minutes: at the pace of P-EAGLE's second seed; "
    note += f"{files}. Held-out accuracy by depth at the end:"
    shares = {name: trained(head)["held_out"][-1]["held_out"] for head, name in HEADS.items()}
    note += ";".join(f" {name} {percent(found['accuracy'])}" for name, found in shares.items())
    note += f". The right token is among the selector's 16 candidates in {percent(shares['P-EAGLE']['recall_at_16'])}"
    al = {(row["K"], row["how"]): row["al"] for row in trained("peagle")["al"]}
    both = (f"{al[k, 'vllm']:.3f} and {al[k, 'replay']:.3f} at K = {k}" for k, how in al if how == "vllm")
    note += f". AL of P-EAGLE's last checkpoint in vLLM, and by replay: {', '.join(both)}"
    return f"{table(('tokens seen', 'minutes', *series), rows)}\n\n{note}."


def recipe_plot() -> str:
    """``learning`` as SVG."""

    def paint(axes: Axes) -> None:
        for name, found in learning().items():
            axes.plot([tokens / 1e6 for tokens in found], list(found.values()), marker="o", label=name)

        axes.set(xlabel="million tokens seen", ylabel="acceptance length, K = 3")

    return draw(paint)


def length(found: dict, form: str = ".2f") -> str:
    """An acceptance length and its interval."""
    low, high = found["al_95"]
    return f"{found['al']:{form}} [{low:{form}}, {high:{form}}]"


def gain(found: dict) -> str:
    """A relative gain and its interval."""
    low, high = found["gain_95"]
    return f"{found['gain']:+.1%} [{low:+.1%}, {high:+.1%}]"


def aims() -> str:
    """What was aimed at on the real target, and what came of it."""
    arms, looked_up, rows = read("real")["arms"], "P-EAGLE with look-up", []
    at_7 = {row["arm"]["name"]: row["sets"] for row in arms if row["arm"]["k"] == 7}
    timed = {row["arm"]["name"]: row["sets"] for row in best_arms()}
    of_eagle = [row["sets"] for row in arms if row["arm"]["name"] == "EAGLE-3" and row["arm"]["k"] < 7]

    def al(name: str, mine: str, other: str) -> tuple[float, ...]:
        over = at_7[mine][name]["over"][other]
        return tuple(1 + edge for edge in (over["gain"], *over["gain_95"]))

    def speed(name: str, mine: str, other: str) -> tuple[float, ...]:
        found = of_eagle if other == "EAGLE-3" else [timed[other]]
        best = max((sets[name]["times_no_speculation"]["1"] for sets in found), key=itemgetter("median"))
        pairs = zip(timed[mine][name]["times_no_speculation"]["1"]["samples"], best["samples"], strict=True)
        low, median, high = sorted(one / two for one, two in pairs)
        return median, low, high

    for what, ratio, mine, other, aim, sets in (
        ("AL at K = 7", al, PLAIN, "EAGLE-3", 0.95, TITLES),
        ("AL at K = 7", al, "P-EAGLE", PLAIN, 1.08, TITLES),
        ("AL at K = 7", al, "P-EAGLE", "EAGLE-3", 1.0, TITLES),
        ("tokens/s", speed, "P-EAGLE", "EAGLE-3", 1.2, TITLES),
        ("tokens/s", speed, looked_up, "EAGLE-3", 1.2, TITLES),
        ("tokens/s on HumanEval", speed, "P-EAGLE", "none", 1.4, ["humaneval"]),
        ("tokens/s on HumanEval", speed, looked_up, "none", 1.4, ["humaneval"]),
    ):
        cells = [""] * len(TITLES)
        for at, name in enumerate(sets):
            value, low, high = ratio(name, mine, other)
            verdict = "met" if low >= aim else "missed" if high < aim else "undecided"
            cells[at] = f"{value:.2f} [{low:.2f}, {high:.2f}], {verdict}"
        rows.append((f"{what}: {mine} / {other}", f"{aim:.2f}", *cells))
    note = "AL: 95%, paired by prompt. tokens/s: at 1 in flight, median, least and most of three runs; EAGLE-3 at the "
    note += "K that is faster on the set, the others at README's. "
    note += "Right at positions 1 to 4, where all before were, at K = 7:"
    for (name, title), drafter in product(TITLES.items(), ("P-EAGLE", "EAGLE-3")):
        reached = [1.0, *at_7[drafter][name]["acceptance"]]
        note += f" {title}, {drafter}: {percent([now / before for before, now in pairwise(reached)])};"
    return f"{table(('ratio', 'aim', *TITLES.values()), rows)}\n\n{note.rstrip(';')}."


def variants() -> str:
    """Smaller heads and one sharpened after its training, on the real target."""
    result, rows = read("variants"), []
    for row in result["variants"]:
        size = f"{row['bytes'] / row['bytes_before'] - 1:+.0%}" if "bytes" in row else ""
        cells = [f"{length(found)}, {gain(found)}" for found in row["sets"].values()]
        rows.append((row["name"], row["k"], row["against"], *cells, size))
    columns = ("drafter", "K", "against", "HumanEval: AL [95%], gain", "MT-Bench", "bytes of a draft step")
    covered = ", ".join(f"{int(size):,}: {share:.1%}" for size, share in result["coverage"].items())
    note = (
        f"Greedy, {answer(result)}. Share of held-out answers' tokens that so many draft tokens cover, chosen by the "
        f"other answers: {covered}. Second seeds after the first sitting, {answer(read('seeds'))}:"
    )
    for row in read("seeds")["variants"]:
        note += f" {row['name']} over {row['against']} {' and '.join(map(gain, row['sets'].values()))};"
    note += " `benchmarks/results/seeds.json`;"
    return shown("variants", columns, rows, note)


def traffic() -> str:
    """A selector fitted to recorded traffic, on the real target."""
    result, rows = read("traffic"), []
    for title, found in zip(("HumanEval, the other problems", "MT-Bench"), result["sets"].values(), strict=True):
        lengths = (length(found[when], ".3f") for when in ("before", "after"))
        rows.append((title, found["prompts"], *lengths, gain(found)))
    columns = ("prompts", "number", "AL before [95%]", "AL after", "gain, paired")
    note = (
        f"SmolLM2-135M-Instruct, {result['engine']['dtype']}, greedy, K = {result['k']}, {answer(result)}; "
        f"traffic: HumanEval's first {result['traffic']} problems, "
        f"whose answers gave {result['sharpen']['drafts']:,} drafts to learn from."
    )
    return shown("traffic", columns, rows, note)


# Page -> what stands between the markers of these names.
GENERATED = {
    "README.md": [real],
    "docs/features.md": [targets],
    "docs/sharpen.md": [variants],
    "docs/recipe.md": [recipe],
    "docs/performance.md": [host],
    "docs/acceptance.md": [drafters, aims, limits, lookup, long_prompts, traffic, structured],
}
PLOT = "docs/images/recipe.svg"


def outdated() -> dict[str, str]:
    """The pages whose tables are not what they would be now, with the right text."""
    pages = {}
    for name, makers in GENERATED.items():
        pages[name] = (ROOT / name).read_text()
        for make in makers:
            pages[name] = between(pages[name], make.__name__, make())
    pages[PLOT] = recipe_plot()
    return {name: text for name, text in pages.items() if (ROOT / name).read_text() != text}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, fail when a table is out of date")
    args = parser.parse_args()
    stale = outdated()
    for name, text in stale.items():
        if args.check:
            print(f"{name} is out of date: make docs", file=sys.stderr)
        else:
            (ROOT / name).write_text(text)
            print(f"wrote {name}")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
