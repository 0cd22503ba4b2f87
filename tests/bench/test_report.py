"""report.md: its tables, warnings and errors, and which K it says to serve: no more than the noise allows."""

import json
import shlex
from pathlib import Path

import pytest

from peagle_tools.bench.cells import Cell, CellResult, Results, read_results
from peagle_tools.bench.metrics import points
from peagle_tools.bench.report import repeated_table, write_report
from peagle_tools.bench.schedule import advice
from peagle_tools.bench.suite import Suite
from peagle_tools.shared.acceptance import Acceptance
from peagle_tools.shared.errors import ToolError
from tests.bench import synthetic
from tests.support.command import run


def report(folder: Path) -> str:
    """The Markdown page that the command writes of these results."""
    done = run("bench", "report", folder)
    assert done.exit_code == 0, done.output
    return (folder / "report.md").read_text()


def best_table(text: str) -> list[str]:
    """The lines of the report's first table."""
    return text.split("## Best K, prompts\n\n")[1].split("\n\n")[0].splitlines()


def test_acceptance_by_repeated_tokens_is_a_table_over_all_concurrencies(suite: Suite) -> None:
    counts = {1: {0: Acceptance(4, (3, 1))}, 4: {0: Acceptance(4, (2, 0)), 3: Acceptance(1, (0, 0))}}
    cells = [synthetic.result(Cell("EAGLE-3", 3, "prompts", 1, 1))]
    cells += [CellResult(cell=Cell("P-EAGLE", 3, "prompts", c, 1), repeated=seen) for c, seen in counts.items()]
    (table,) = repeated_table("prompts", points(Results(synthetic.sweep(suite), cells)))
    rows = ["| drafter | 0 | 3 |", "|---|---|---|", "| P-EAGLE K=3 | 1.75 (89%) | 1.00 (11%) |"]
    assert table.splitlines()[2:5] == rows


def test_the_report(tmp_path: Path, suite: Suite) -> None:
    """At c=1 a P-EAGLE round of 7.55 ms yields 3.598 tokens, one of EAGLE-3 at K=3 2.242 in 9.35 ms."""
    failed = {"p-eagle-k7-prompts-c4-r2": "the server ended"}
    text = report(synthetic.write(tmp_path / "r", suite, spread=0, failed=failed))
    assert "- P-EAGLE K=7, prompts, c=4, repeat 2: the server ended" in text and "| 1 of 2 |" in text
    assert "| P-EAGLE | 7 | 1 | 477 | 20.0 / 20.0 | 2.1 / 2.1 | 3.60 | 75 56 42 32 24 18 13 | 100 | 2 |" in text
    assert best_table(text)[2:] == [
        "| none | 238 | 833 |",
        "| EAGLE-3 | 240 (K=3) | 862 (K=3) |",
        "| P-EAGLE | 477 (K=7) | 1,564 (K=7) |",
        "| EAGLE-3 / none | 1.01 (1.01..1.01) | 1.03 (1.03..1.03) |",
        "| P-EAGLE / none | 2.00 (2.00..2.00) | 1.88? (1.88..1.88) |",  # of one repeat
        "| P-EAGLE / EAGLE-3 | 1.99 (1.99..1.99) | 1.81? (1.81..1.81) |",
    ]
    assert "\n  target: ./target\n" in text.split("## Setting")[1]


def test_doubt_is_marked(tmp_path: Path, suite: Suite) -> None:
    """Where ranges overlap, and in all that was measured once, which is warned about."""
    same = {("EAGLE-3", k, c): 3.3 if k == 7 else 1.0 for k in (3, 7) for c in (1, 4)}
    wide = report(synthetic.write(tmp_path / "wide", suite, spread=0.6, slower=same))
    assert "?" in "".join(best_table(wide)) and "its noise is unknown" not in wide
    once = report(synthetic.write(tmp_path / "once", suite.model_copy(update={"repeats": 1})))
    assert "".join(best_table(once)).count("?") == 2 * 3
    assert "- prompts: one repeat, so its noise is unknown and every ratio in doubt" in once


def test_what_should_not_be_is_warned_about(tmp_path: Path, suite: Suite) -> None:
    """Another text, and an AL that differs by concurrency."""

    def edit(cell, data) -> None:
        if (cell.arm, cell.k, cell.concurrency) == ("P-EAGLE", 7, 4):
            data["generated_texts"][0] = "another"
            data["spec_decode_accepted_tokens"] = 700

    text = report(synthetic.write(tmp_path / "r", suite, spread=0, edit=edit))
    assert text.split("## Warnings\n\n")[1].split("\n\n")[0].splitlines() == [
        "- P-EAGLE K=7, prompts, c=4: 91.67% of the answers are those without speculation; float32 promises all.",
        "- P-EAGLE K=7, prompts, c=4: AL 1.70, but 3.60 at the smallest concurrency.",
    ]


def test_no_results_or_nothing_but_failures(tmp_path: Path, suite: Suite) -> None:
    other = synthetic.write(tmp_path / "other", suite) / "sweep.json"
    other.write_text(other.read_text().replace('"P-EAGLE"', '"ours"'))
    with pytest.raises(ToolError, match=r"sweep\.json has no arm P-EAGLE, of which cells are there"):
        write_report(other.parent)
    with pytest.raises(ToolError, match="no results here"):
        write_report(tmp_path)
    single = suite.model_copy(update={"arms": {"none": suite.arms["none"]}, "concurrency": [1], "repeats": 1})
    folder = synthetic.write(tmp_path / "r", single, failed={"none-k0-prompts-c1-r1": "no GPU"})
    with pytest.raises(ToolError, match="all 1 cells failed; the first: none, prompts, c=1, repeat 1: no GPU"):
        write_report(folder)
    assert not (folder / "report.md").exists()


def lines(folder: Path, suite: Suite, **changes) -> list[str]:
    """Those of P-EAGLE, the last arm."""
    measured = points(read_results(synthetic.write(folder, suite, **{"spread": 0.001} | changes)))
    text = list(advice("prompts", measured, suite.model_dump(mode="json")))
    return text[text.index("prompts: P-EAGLE.") :] if "prompts: P-EAGLE." in text else text


def config(text: list[str]) -> dict:
    option, value = shlex.split(text[-1])
    assert option == "--speculative-config"
    return json.loads(value)


def test_the_report_ends_with_the_schedule(tmp_path: Path, suite: Suite) -> None:
    """The smaller depth beyond c=1, because it alone gains at c=4; vLLM reads the config."""
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    text = lines(tmp_path / "r", suite, slower={("P-EAGLE", 7, 4): 2.0})
    assert text[1] == "c=1: K=7, 476 tokens/s, 2.00 (2.00..2.00) x no speculation"
    assert text[2].startswith("c=4: K=3, ") and "keeps K=3 beyond it" in text[3]
    assert text[4].startswith("Warning: under data parallelism vLLM drops this schedule and uses K=7")
    pasted = config(text)
    assert build_dynamic_sd_schedule_lookup(pasted["num_speculative_tokens_per_batch_size"], 6, 7)[1:] == [7, *[3] * 5]
    assert pasted == {
        "method": "eagle3",
        "model": "./peagle",
        "parallel_drafting": True,
        "num_speculative_tokens": 7,
        "num_speculative_tokens_per_batch_size": [[1, 1, 7], [2, 4, 3]],
    }
    assert report(tmp_path / "r").endswith(f"\n```\n{text[-1]}\n```\n")


def test_from_where_not_to_speculate(tmp_path: Path, suite: Suite) -> None:
    wider = suite.model_copy(update={"concurrency": [1, 4, 8, 16]})
    slower = {("P-EAGLE", k, c): 5.0 for k in (3, 7) for c in (8, 16)}
    text = lines(tmp_path / "r", wider, slower=slower)
    assert "Above c=4, do not speculate." in text
    assert config(text)["num_speculative_tokens_per_batch_size"] == [[1, 4, 7], [5, 16, 0]]
    never = {("P-EAGLE", k, c): 5.0 for k in (3, 7) for c in (1, 4)}
    assert lines(tmp_path / "never", suite, slower=never)[-1].endswith("leave --speculative-config out.")


@pytest.mark.parametrize(("rates", "k"), [((310, 311), 7), ((300, 311), 3), ((200, 311), 0)])
def test_what_the_noise_does_not_tell_apart_is_the_smallest_depth(
    tmp_path: Path, suite: Suite, rates: tuple[int, int], k: int
) -> None:
    """K=7 at ``rates``, its two repeats, K=3 at 300 and 309 or below, no speculation at 250 and 251."""
    speeds = {("P-EAGLE", 7): rates, ("P-EAGLE", 3): (300, 309) if k else (249, 252), ("none", 0): (250, 251)}

    def edit(cell, data) -> None:
        data["output_throughput"] = speeds.get((cell.arm, cell.k), (100, 101))[cell.repeat - 1]

    text = lines(tmp_path / "r", suite, edit=edit)
    depth = f": K={k}, " if k else "no speculation; the fastest depth is K=7, 256 tokens/s, 1.02? (0.80..1.24) x"
    assert [line.partition(": ")[0] for line in text if depth in line] == ["c=1", "c=4"]


def test_each_arm_has_its_depth_with_its_environment_and_flags(tmp_path: Path, suite: Suite) -> None:
    """One depth throughout needs no schedule."""
    named = suite.arms["P-EAGLE"].model_copy(update={"environment": {"A": "1"}, "flags": "--max-num-seqs 8"})
    text = lines(tmp_path / "r", suite.model_copy(update={"arms": suite.arms | {"P-EAGLE": named}}))
    assert "Measured with A=1 --max-num-seqs 8." in text
    assert "num_speculative_tokens_per_batch_size" not in config(text) and not any("drops" in line for line in text)
    shown = report(tmp_path / "r")
    assert "- prompts: EAGLE-3.\n" in shown and '"model": "./eagle"' in shown and '"model": "./peagle"' in shown


def test_without_repeats_or_a_base_no_depth_is_named(tmp_path: Path, suite: Suite) -> None:
    once = lines(tmp_path / "once", suite.model_copy(update={"repeats": 1}))
    why = "for one repeat does not show the noise; `--repeats 3` adds two."
    assert once == [f"prompts: no K for {arm}, {why}" for arm in ("EAGLE-3", "P-EAGLE")]
    arms = {name: arm for name, arm in suite.arms.items() if name != "none"}
    why = "for no concurrency was measured both with it and without speculation."
    bare = lines(tmp_path / "bare", suite.model_copy(update={"arms": arms}))
    assert bare == [f"prompts: no K for {arm}, {why}" for arm in ("EAGLE-3", "P-EAGLE")]
    measured = points(read_results(tmp_path / "once"))
    (line,) = advice("prompts", [p for p in measured if not p.k], {})
    assert line == "prompts: no K, for no drafter was measured."
