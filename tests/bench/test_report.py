"""report.md and the plots."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from peagle_tools.bench.cells import Cell
from peagle_tools.bench.metrics import points
from peagle_tools.bench.report import place_tables, write_report
from peagle_tools.bench.suite import Suite
from peagle_tools.cli import app
from peagle_tools.shared.acceptance import Acceptance, Places
from peagle_tools.shared.errors import ToolError
from tests.bench import synthetic
from tests.bench.rawdata import ACCEPTANCE


def report(folder: Path) -> str:
    """The Markdown page that the command writes of these results."""
    done = CliRunner().invoke(app, ["bench", "report", str(folder)])
    assert done.exit_code == 0, done.output
    return (folder / "report.md").read_text()


def test_acceptance_by_context_is_a_table_over_all_concurrencies(suite: Suite) -> None:
    results = [synthetic.result(suite, Cell(arm, 3, "prompts", c, 1)) for arm in ("EAGLE-3", "P-EAGLE") for c in (1, 4)]
    context = [
        {},
        {},
        {255: Acceptance(4, (3, 1))},
        {255: Acceptance(4, (2, 0)), 511: Acceptance(1, (0, 0))},
    ]
    cells = [replace(cell, places=Places(context=seen)) for cell, seen in zip(results, context, strict=True)]
    (table,) = place_tables("prompts", points(cells))
    assert table.splitlines()[2:5] == [
        "| drafter | up to 255 | up to 511 |",
        "|---|---|---|",
        "| P-EAGLE K=3 | 1.75 (89%) | 1.00 (11%) |",
    ]


def test_every_file_is_written_and_named(tmp_path: Path, suite: Suite) -> None:
    failed = {"p-eagle-k7-prompts-c4-r2": "the server ended"}
    out = synthetic.write(tmp_path / "r", suite, spread=0, failed=failed)
    text = report(out)
    named = re.findall(r"!\[.*\]\((.*\.svg)\)", text)
    assert {out / name for name in named} == set((out / "plots").iterdir()) and len(named) == 3
    cells = len(list((out / "cells").iterdir()))
    assert len((out / "report.csv").read_text().splitlines()) == cells  # a header, and no row for the one that failed
    assert "- P-EAGLE K=7, prompts, c=4, repeat 2: the server ended" in text and "| 1 of 2 |" in text
    # a round of 7.55 ms yields 3.598 tokens
    assert "| P-EAGLE | 7 | 1 | 477 | 20.0 / 20.0 | 2.1 / 2.1 | 3.60 | 75 56 42 32 24 18 13 | 100 | 2 |" in text


def test_best_k_and_ratios(tmp_path: Path, suite: Suite) -> None:
    """Rounds: 4.2 ms the target, 2 to speculate; P-EAGLE K=7 +1 +.35; EAGLE-3 K=3 +3 +.15, K=7 +7 +.35."""
    text = report(synthetic.write(tmp_path / "r", suite, spread=0))

    def rate(kind: str, k: int, ms: float) -> float:
        return (1 + sum(round(1000 * ACCEPTANCE[kind] ** i) for i in range(1, k + 1)) / 1000) / ms

    p, e = rate("P-EAGLE", 7, 7.55), rate("EAGLE-3", 3, 9.35)
    for arm, best in {"none": 1000 / 4.2, "EAGLE-3": 1000 * e, "P-EAGLE": 1000 * p}.items():
        assert f"| {arm} | {best:.0f}" in text
    for pair, ratio in {"P-EAGLE / EAGLE-3": p / e, "P-EAGLE / none": p * 4.2, "EAGLE-3 / none": e * 4.2}.items():
        assert f"| {pair} | {ratio:.2f} ({ratio:.2f}..{ratio:.2f}) |" in text
    assert "(K=7) |" in text and "(K=3) |" in text


def test_doubt_is_marked(tmp_path: Path, suite: Suite) -> None:
    def marks(name: str, suite: Suite, **changes) -> tuple[int, int]:
        text = report(synthetic.write(tmp_path / name, suite, **changes))
        (ratios,) = re.findall(r"^## Ratios at the best K, prompts\n\n(.*?)\n\n", text, re.DOTALL | re.MULTILINE)
        return ratios.count("?"), text.count("- prompts: one repeat, so its noise is unknown and every ratio in doubt")

    same = {("EAGLE-3", k, c): 3.3 if k == 7 else 1.0 for k in (3, 7) for c in (1, 4)}
    assert marks("wide", suite, spread=0.6, slower=same)[0] > 0
    assert marks("tight", suite, spread=0.001) == (0, 0)
    assert marks("alone", suite.model_copy(update={"repeats": 1})) == (2 * 3, 1)


WARNED = {
    "another text": (
        lambda data: data.update(generated_texts=["another", *data["generated_texts"][1:]]),
        "91.67% of the answers are those without speculation; float32 promises all.",
    ),
    "AL": (
        lambda data: data.update(spec_decode_per_position_acceptance_rates=[0.1] * 7),
        "AL 1.70, but 3.60 at the smallest concurrency.",
    ),
}


@pytest.mark.parametrize("planted", WARNED)
def test_what_should_not_be_is_warned_about(tmp_path: Path, suite: Suite, planted: str) -> None:
    change, text = WARNED[planted]

    def edit(cell, data) -> None:
        if (cell.arm, cell.k, cell.concurrency) == ("P-EAGLE", 7, 4):
            change(data)

    text_of_report = report(synthetic.write(tmp_path / "r", suite, spread=0, edit=edit))
    warned = text_of_report.split("## Warnings\n\n")[1].split("\n\n")[0]
    assert warned == f"- P-EAGLE K=7, prompts, c=4: {text}"


def test_no_results_or_nothing_but_failures(tmp_path: Path, suite: Suite) -> None:
    with pytest.raises(ToolError, match="no results here"):
        write_report(tmp_path)
    single = suite.model_copy(update={"arms": {"none": suite.arms["none"]}, "concurrency": [1], "repeats": 1})
    folder = synthetic.write(tmp_path / "r", single, failed={"none-k0-prompts-c1-r1": "no GPU"})
    with pytest.raises(ToolError, match="all 1 cells failed; the first: none, prompts, c=1, repeat 1: no GPU"):
        write_report(folder)
    assert not (folder / "report.md").exists()
