"""Acceptance from counters; report.md, which says which K to serve, no more than the noise allows; the gate on what is
worse beyond noise."""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from typer.testing import Result

from peagle_tools.bench.cells import Cell, CellResult, Results, read_results
from peagle_tools.bench.compare import compare
from peagle_tools.bench.metrics import AL, metric, points, without_speculation
from peagle_tools.bench.report import repeated_table, write_report
from peagle_tools.bench.schedule import advice
from peagle_tools.bench.suite import Suite
from peagle_tools.shared.acceptance import Acceptance, Answer, by_repeated, read_engine
from peagle_tools.shared.errors import ToolError
from tests.bench import synthetic
from tests.support.command import only_line, run


def test_an_engines_counters() -> None:
    """Before the first draft vLLM has no counts by position; without speculation it has no such counters at all."""

    def engine(**counts: int | list[int]) -> SimpleNamespace:
        metrics = [
            SimpleNamespace(name=f"vllm:spec_decode_num_{name}", **{"values" if isinstance(n, list) else "value": n})
            for name, n in counts.items()
        ]
        return SimpleNamespace(get_metrics=lambda: [SimpleNamespace(name="vllm:num_requests", value=7), *metrics])

    before = read_engine(engine(drafts=4, draft_tokens=12, accepted_tokens=5, accepted_tokens_per_pos=[3, 2, 0]))
    after = read_engine(engine(drafts=14, draft_tokens=42, accepted_tokens=22, accepted_tokens_per_pos=[11, 8, 3]))
    assert after.since(before) == Acceptance(10, (8, 6, 3))
    assert after.since(read_engine(engine())) == after
    assert (read_engine(engine()).length, read_engine(engine()).shares) == (1.0, ())


def test_steps_without_drafts_count() -> None:
    """n-gram's: 10 answers of 64 tokens in 345 steps, 112 of them with drafts. vLLM says 3.54."""
    cell = {"output_lens": [64] * 10, "spec_decode_num_drafts": 112, "spec_decode_accepted_tokens": 285, AL: 3.54}
    assert metric(cell, AL) == 1 + 285 / 345 and metric({"output_lens": [64]}, AL) == 1


def test_the_base_is_the_fastest_arm_without_speculation() -> None:
    arms = [Mock(dataset="d", concurrency=1, k=0, tokens_per_second=Mock(median=speed)) for speed in (5, 9, 7)]
    assert without_speculation(arms) == {("d", 1): arms[1]}


def test_drafts_are_counted_by_the_last_tokens_that_occurred_before() -> None:
    """Of 1 2 3 4 1 2 9 3 4 1 the drafts follow 1 (4 1 is older), 1 2, 9, and 3 4 1; an answer whose steps are not all
    known is left out."""
    prompt, output = [1, 2, 3, 4], [1, 2, 9, 3, 4, 1, 5]
    steps = {"num_spec_tokens": 2, "num_spec_steps": 4, "per_step_accepted": [0, 0, 2, 0]}
    none = Answer(range(9), (), {"num_spec_tokens": 3, "num_spec_steps": 0})
    counts = {0: Acceptance(1, (1, 1))} | dict.fromkeys((1, 2, 3), Acceptance(1, (0, 0)))
    assert by_repeated([Answer(prompt, output, steps), Answer(prompt, [*output, 5, 5], steps), none]) == counts


def report(folder: Path) -> str:
    done = run("bench", "report", folder)
    assert done.exit_code == 0, done.output
    return (folder / "report.md").read_text()


def best_table(text: str) -> list[str]:
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
    depths = {"num_speculative_tokens": 7, "num_speculative_tokens_per_batch_size": [[1, 1, 7], [2, 4, 3]]}
    assert pasted == {"method": "eagle3", "model": "./peagle", "parallel_drafting": True, **depths}
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
def test_within_the_noise_the_smallest_depth_wins(tmp_path: Path, suite: Suite, rates: tuple[int, int], k: int) -> None:
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


def results(folder: Path, suite: Suite, **changes):
    return read_results(synthetic.write(folder, suite, **changes))


def gate(folder: Path) -> Result:
    return run("bench", "compare", folder / "a", folder / "b")


@pytest.mark.parametrize(("after", "is_worse"), [((1.0, 1.2), False), ((1.15, 1.3), True)])
def test_only_disjoint_spreads_count(suite: Suite, after: tuple[float, float], is_worse: bool) -> None:
    def both(noises: tuple[float, float]):
        cells = [Cell("none", 0, "prompts", 1, repeat) for repeat in (1, 2)]
        measured = [synthetic.result(cell, noise=noise) for cell, noise in zip(cells, noises, strict=True)]
        return Results(synthetic.sweep(suite), measured)

    (change,) = compare(both((0.9, 1.1)), both(after))
    assert bool(change.worse) == is_worse


HERE = "P-EAGLE K=7, prompts, c=4"


def accepted(share: float):
    """Other acceptance, and nothing else."""
    return lambda data: data.update(spec_decode_accepted_tokens=share * data["spec_decode_accepted_tokens"])


def times(name: str, factor: float):
    return lambda data: data.update({key: value * factor for key, value in data.items() if name in key})


def another_answer(data) -> None:
    data["generated_texts"] = [*data["generated_texts"][:-1], "another"]


ONE_REPEAT = "another text, in one repeat"
PLANTED = {
    "throughput": (times("output_throughput", 0.9), "tokens/s 1564 -> 1408"),
    "AL": (accepted(0.4), "AL 3.598 -> 2.039"),
    "TTFT": (times("p50_ttft_ms", 10), "TTFT p50 20 -> 200"),
    "the tail of TTFT": (times("p99_ttft_ms", 2), "TTFT p99 20 -> 40"),
    "TPOT": (times("p50_tpot_ms", 1.15), "TPOT p50"),
    "the tail of TPOT": (times("p99_tpot_ms", 1.5), "TPOT p99"),
    "no TPOT": (lambda data: data.update(output_lens=[1] * len(data["output_lens"])), "-> no sample"),
    ONE_REPEAT: (another_answer, "same text as without speculation 100.00% -> 91.67%, in float32"),
    "no text": (lambda data: data.update(generated_texts=[]), "same text as without speculation 100.00% -> unknown"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_regression_fails_the_gate(tmp_path: Path, suite: Suite, planted: str) -> None:
    """The cell, and no other, is named with what is wrong."""
    change, text = PLANTED[planted]

    def edit(cell: Cell, data) -> None:
        if cell.label == HERE and (cell.repeat == 2 or planted != ONE_REPEAT):
            change(data)

    results(tmp_path / "a", suite, spread=0), results(tmp_path / "b", suite, spread=0, edit=edit)
    done = gate(tmp_path)
    assert done.exit_code == 1
    named = [line for line in done.output.splitlines() if line.startswith(f"{HERE}: ")]
    assert any(text in line for line in named), done.output
    assert "1 of 10 cells are worse, failed or missing" in done.output


def test_no_regression(tmp_path: Path, suite: Suite) -> None:
    """Texts may differ where they are not promised, acceptance may rise, and latencies differ more than throughput."""

    def edit(cell: Cell, data) -> None:
        if cell.k:
            another_answer(data), accepted(1.2)(data), times("_ttft_ms", 1.08)(data)

    before = results(tmp_path / "a", suite, spread=0, dtype="bfloat16")
    after = results(tmp_path / "b", suite, spread=0, dtype="bfloat16", edit=edit)
    assert not any(change.worse for change in compare(before, after))


def test_a_failed_cell_is_a_regression(tmp_path: Path, suite: Suite) -> None:
    failed = {f"p-eagle-k7-prompts-c4-r{repeat}": "the server ended" for repeat in (1, 2)}
    before, failed["eagle-3-k3-prompts-c1-r1"] = results(tmp_path / "a", suite), "one repeat"
    changes = compare(before, results(tmp_path / "b", suite, failed=failed))
    every = dict.fromkeys((result.cell.id for result in before.cells), "it never began")
    none_left = compare(before, results(tmp_path / "c", suite, failed=every))
    assert {text for change in none_left for text in change.worse} == {"failed: it never began"}
    assert {change.label: change.worse for change in changes if change.worse} == {
        HERE: ["failed: the server ended"],
        "EAGLE-3 K=3, prompts, c=1": ["0 repeats failed before, 1 now"],
    }


def test_results_that_are_not_comparable(tmp_path: Path, suite: Suite) -> None:
    before = results(tmp_path / "a", suite, gpu="1 x B200")
    with pytest.raises(ToolError, match="measured on 1 x B200, then on 1 x H200"):
        compare(before, results(tmp_path / "b", suite, gpu="1 x H200"))
    dataset = suite.datasets["prompts"].model_copy(update={"output_tokens": 32})
    shorter = suite.model_copy(update={"datasets": {"prompts": dataset}})
    for name, other in (("c", shorter), ("d", suite.model_copy(update={"temperature": 1.0}))):
        with pytest.raises(ToolError, match="other target, temperature, prompts or lengths"):
            compare(before, results(tmp_path / name, other, gpu="1 x B200"))


def test_unreadable_results(tmp_path: Path, suite: Suite) -> None:
    file = synthetic.write(tmp_path / "a", suite) / "cells/none-k0-prompts-c1-r1.json"
    file.write_text("{}")
    line = f"peagle-vllm: {file} is not a result of `bench run`; delete it, and the same"
    assert only_line(gate(tmp_path)).startswith(line)
