"""The two pages of a report."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from typer.testing import CliRunner

from peagle_tools.bench import BenchError, plots
from peagle_tools.bench.cells import read_results
from peagle_tools.bench.metrics import best_rows, points
from peagle_tools.bench.plots import Plot
from peagle_tools.bench.published import matching, published
from peagle_tools.bench.report import write_report
from peagle_tools.bench.suite import Suite, read_suite
from peagle_tools.cli import app
from tests.bench import synthetic
from tests.bench.rawdata import ACCEPTANCE


@pytest.fixture
def suite(suite_file: Path) -> Suite:
    return read_suite(suite_file)


def report(folder: Path) -> str:
    """The Markdown page of these results."""
    write_report(folder, folder)
    return (folder / "report.md").read_text()


class Checker(HTMLParser):
    """Every tag is closed, nothing is fetched, no script runs."""

    VOID = ("meta",)

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs) -> None:
        self.seen.append(tag)
        assert tag not in ("script", "link", "img", "iframe")
        links = [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        assert all(link.startswith("#") for link in links)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_self_contained(tmp_path: Path, suite: Suite) -> None:
    write_report(synthetic.write(tmp_path / "r", suite), tmp_path / "out")
    text = (tmp_path / "out/report.html").read_text()
    checker = Checker()
    checker.feed(text)
    assert not checker.open
    assert checker.seen.count("figure") == 4 + 2  # four charts, a heat map for each arm that speculates
    fetched = re.sub(r"<pre>.*?</pre>|xmlns[:a-z]*=\"[^\"]*\"", "", text, flags=re.DOTALL)
    assert "http" not in fetched
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["plots", "report.html", "report.md"]
    named = re.findall(r"!\[.*\]\((.*\.svg)\)", (tmp_path / "out/report.md").read_text())
    assert {tmp_path / "out" / name for name in named} == set((tmp_path / "out/plots").iterdir()) and len(named) == 6


def test_best_k_and_ratios(tmp_path: Path, suite: Suite) -> None:
    found = points(read_results(synthetic.write(tmp_path / "r", suite, spread=0)))
    row = next(row for row in best_rows(found) if row.concurrency == 1)

    def rate(kind: str, k: int, ms: float) -> float:
        return (1 + sum(round(1000 * ACCEPTANCE[kind] ** i) for i in range(1, k + 1)) / 1000) / ms

    # rounds: 4.2 ms the target, 2 to speculate; P-EAGLE K=7 +1 +.35; EAGLE-3 K=3 +3 +.15, K=7 +7 +.35
    assert {arm: point.k for arm, point in row.best.items()} == {"none": 0, "EAGLE-3": 3, "P-EAGLE": 7}
    p, e = rate("P-EAGLE", 7, 7.55), rate("EAGLE-3", 3, 9.35)
    assert row.ratios["P-EAGLE", "EAGLE-3"].median == pytest.approx(p / e)
    assert row.ratios["P-EAGLE", "none"].median == pytest.approx(p * 4.2)
    assert row.ratios["EAGLE-3", "none"].median == pytest.approx(e * 4.2)


def test_a_ratio_whose_spread_holds_one_is_warned_about(tmp_path: Path, suite: Suite) -> None:
    same = {("EAGLE-3", k, c): 3.3 if k == 7 else 1.0 for k in (3, 7) for c in (1, 4)}
    wide = report(synthetic.write(tmp_path / "wide", suite, spread=0.6, slower=same))
    assert "and holds 1." in wide
    tight = report(synthetic.write(tmp_path / "tight", suite, spread=0.001))
    assert "Ratios in doubt" not in tight
    single = suite.model_copy(update={"repeats": 1})
    alone = report(synthetic.write(tmp_path / "alone", single))
    assert "- prompts: every ratio, for there is one repeat" in alone
    (ratios,) = re.findall(r"^## Ratios at the best K, prompts\n\n(.*?)\n\n", alone, re.DOTALL | re.MULTILINE)
    assert ratios.count("?") == 2 * 3 and alone.count("(in doubt: one repeat)") == 2 * 2


def test_doubt_has_its_own_colour(tmp_path: Path, suite: Suite) -> None:
    """A doubtful ratio is marked in the tables, and its square in the map has no colour."""

    def page(name: str, **changes) -> tuple[int, int]:
        folder = synthetic.write(tmp_path / name, suite.model_copy(update=changes), spread=0.001)
        write_report(folder, folder)
        speedups = (folder / "plots/p-eagle-speedup-over-no-speculation-prompts.svg").read_text()
        squares = speedups.split('id="QuadMesh_1"')[1].split("</g>")[0]
        return (folder / "report.html").read_text().count('<td class="doubt">'), squares.count("fill: #")

    assert page("sure") == (0, 4)
    assert page("doubtful", repeats=1) == (3 * 2, 0)


def test_the_report_opens_with_the_verdict(tmp_path: Path, suite: Suite) -> None:
    """Which arm, which K, at which concurrency, how sure; before anything else."""
    text = report(synthetic.write(tmp_path / "r", suite, spread=0.001))
    lines = [line for line in text.splitlines() if line]
    assert lines[:2] == ["# Sweep trial", "Fastest:"]
    assert re.fullmatch(
        r"- prompts, c=1: \*\*P-EAGLE K=7\*\*, \d+ tokens/s; 2\.00 x none \(\d\.\d\d\.\.\d\.\d\d over 2 repeats\); "
        r"1\.\d\d x EAGLE-3 K=3 \(1\.\d\d\.\.1\.\d\d over 2 repeats\)",
        lines[2],
    ), lines[2]
    assert lines[3].startswith("- prompts, c=4: **P-EAGLE K=7**") and "## Warnings" not in text
    rates = {
        ("P-EAGLE", 7): (310, 330),
        ("P-EAGLE", 3): (300, 311),
        ("EAGLE-3", 3): (305, 325),
        ("none", 0): (200, 201),
    }

    def edit(cell, data) -> None:
        data["output_throughput"] = rates.get((cell.arm, cell.k), (100, 101))[cell.repeat - 1]

    noisy = report(synthetic.write(tmp_path / "noisy", suite, edit=edit)).splitlines()
    assert noisy[4] == (
        "- prompts, c=1: **P-EAGLE K=7**, 320 tokens/s; 1.60 x none (1.54..1.65 over 2 repeats); 1.02 x EAGLE-3 K=3 "
        "(in doubt: 0.95..1.08 over 2 repeats); K=3 is equal within the noise, and cheaper"
    )
    slow = {(arm, k, c): 9.0 for arm in ("P-EAGLE", "EAGLE-3") for k in (3, 7) for c in (1, 4)}
    assert "- prompts, c=1: **none**" in report(synthetic.write(tmp_path / "slow", suite, slower=slow))


WARNED = {
    "another text": (
        lambda data: data.update(generated_texts=["another", *data["generated_texts"][1:]]),
        "91.67% of the answers are those without speculation; float32 promises all.",
    ),
    "a burst": (
        lambda data: data.update(itls=[[3e-6] * 20 for _ in data["itls"]]),
        "latency samples of 2 of 2 repeats came in a burst and are left out.",
    ),
    "TTFT": (
        lambda data: data.update(p50_ttft_ms=2 * data["p50_ttft_ms"]),
        "TTFT p50 40.0 ms, without speculation 20.0 ms.",
    ),
    "AL": (
        lambda data: data.update(spec_decode_accepted_tokens=700, spec_decode_per_position_acceptance_rates=[0.1] * 7),
        "AL 1.70, but 3.60 at the smallest concurrency.",
    ),
}


@pytest.mark.parametrize("planted", WARNED)
def test_what_should_not_be_is_warned_about(tmp_path: Path, suite: Suite, planted: str) -> None:
    change, text = WARNED[planted]

    def edit(cell, data) -> None:
        if (cell.arm, cell.k, cell.concurrency) == ("P-EAGLE", 7, 4):
            change(data)

    found = report(synthetic.write(tmp_path / "r", suite, spread=0, edit=edit))
    warned = found.split("## Warnings\n\n")[1].split("\n\n")[0]
    assert warned == f"- P-EAGLE K=7, prompts, c=4: {text}"
    assert " /  / " not in found, "latencies that are left out leave their cells empty"


def test_tables_fit_the_page(tmp_path: Path, suite: Suite) -> None:
    """No row is longer than 110 characters: about 750 pixels in the page's font."""
    arms = suite.arms | {"P-EAGLE, stock V1": suite.arms["P-EAGLE"]}
    wide = suite.model_copy(update={"arms": arms, "concurrency": [1, 2, 4, 8, 16, 32, 64]})
    text = report(synthetic.write(tmp_path / "r", wide))
    rows = [line for line in text.splitlines() if line.startswith("| ") and "p50 / p90" not in line]
    assert len(rows) > 100 and max(len(row.replace(" | ", " ")) for row in rows) <= 110


def test_curves_that_coincide_can_be_told_apart(tmp_path: Path, suite: Suite) -> None:
    """At the best K only; no two curves share marker or width, and each has a band over its noise."""
    arms = suite.arms | {"P-EAGLE again": suite.arms["P-EAGLE"]}
    found = points(read_results(synthetic.write(tmp_path / "r", suite.model_copy(update={"arms": arms}), spread=0.1)))
    drawn: list[Axes] = []

    def keep(title: str, paint, size) -> Plot:
        drawn.append(Figure().subplots())
        paint(drawn[-1])
        return Plot(title, "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw", keep)
        plots.throughput("prompts", found), plots.pareto("prompts", found)
    for axes in drawn:
        lines = axes.get_lines()
        assert len(lines) == len(axes.patches) == 4, "one curve and one band for each arm"
        assert len({line.get_marker() for line in lines}) == len({line.get_linewidth() for line in lines}) == 4
        assert [line.get_label() for line in lines][2:] == ["P-EAGLE, K=7", "P-EAGLE again, K=7"]
        for band in axes.patches:
            assert band.get_extents().height > 0


def test_failed_cells_are_named(tmp_path: Path, suite: Suite) -> None:
    folder = synthetic.write(tmp_path / "r", suite, failed={"p-eagle-k7-prompts-c4-r2": "the server ended"})
    text = report(folder)
    assert "- P-EAGLE K=7, prompts, c=4, repeat 2: the server ended" in text
    assert "1 of 2" in text


def test_published_figures_stand_beside_measured_ones(tmp_path: Path, suite: Suite) -> None:
    dataset = suite.datasets["prompts"]
    gpt = suite.model_copy(update={"target": "openai/gpt-oss-20b", "datasets": {"HumanEval": dataset}})
    text = report(synthetic.write(tmp_path / "r", gpt, gpu="1 x H200"))
    assert "| AL, P-EAGLE K=7 | 3.94 | 3.60 |" in text
    assert re.search(r"\| P-EAGLE / EAGLE-3, c=1 \| 1.55 \| \d\.\d\d \|", text)
    assert "| P-EAGLE / EAGLE-3, c=64 | 1.23 | not measured |" in text
    assert "vLLM blog, 2026-03-13; one NVIDIA B200" in text
    assert "on 1 x H200" in text


def test_published_ratios_agree_with_the_published_rates() -> None:
    """Transcription errors would show: best P-EAGLE over best EAGLE-3 is the published ratio."""
    for p in published():
        if not p.tokens_per_second:
            continue
        for c, ratio in p.ratios.items():
            best = {kind: max(by_c[c] for by_c in p.tokens_per_second[kind].values()) for kind in p.tokens_per_second}
            assert best["P-EAGLE"] / best["EAGLE-3"] == pytest.approx(ratio, abs=0.006)
    assert len(matching("Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8", "humaneval")) == 1
    assert not matching("Qwen/Qwen3-32B", "humaneval")


def test_nothing_but_failures(tmp_path: Path, suite: Suite) -> None:
    single = suite.model_copy(update={"arms": {"none": suite.arms["none"]}, "concurrency": [1], "repeats": 1})
    folder = synthetic.write(tmp_path / "r", single, failed={"none-k0-prompts-c1-r1": "no GPU"})
    with pytest.raises(BenchError, match="all 1 cells failed; the first: none, prompts, c=1, repeat 1: no GPU"):
        write_report(folder, folder)
    assert not (folder / "report.html").exists()


def test_without_a_folder_the_latest_sweep_is_reported(tmp_path: Path, suite: Suite, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bench", "report"])
    assert done.exit_code == 2 and "no sweep in ./bench-results" in done.stderr
    synthetic.write(tmp_path / "bench-results/trial", suite)
    done = CliRunner().invoke(app, ["bench", "report"])
    assert done.exit_code == 0
    assert (tmp_path / "bench-results/trial/report.html").exists()
