"""The regression gate: what is slower beyond noise, and what cannot be compared."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from peagle_tools.bench.cells import Cell, Condition, read_results
from peagle_tools.bench.compare import compare
from peagle_tools.bench.suite import Suite
from peagle_tools.cli import app
from peagle_tools.shared.errors import ToolError
from tests.bench import synthetic


def results(folder: Path, suite: Suite, **changes):
    return read_results(synthetic.write(folder, suite, **changes))


def gate(folder: Path) -> Result:
    """``bench compare`` of the results in a and b."""
    return CliRunner().invoke(app, ["bench", "compare", str(folder / "a"), str(folder / "b")])


def test_the_slower_cell_is_named(tmp_path: Path, suite: Suite) -> None:
    after = results(tmp_path / "b", suite, seed=2, slower={("P-EAGLE", 7, 4): 1.1, ("EAGLE-3", 3, 1): 0.9})
    comparison = compare(results(tmp_path / "a", suite, seed=1), after)
    verdicts = {change.condition: change.verdict for change in comparison.changes if change.verdict != "same"}
    assert verdicts == {
        Condition("P-EAGLE", 7, "prompts", 4): "worse",
        Condition("EAGLE-3", 3, "prompts", 1): "faster",
    }


@pytest.mark.parametrize(("after", "verdict"), [((1.0, 1.2), "same"), ((1.15, 1.3), "worse")])
def test_only_disjoint_spreads_count(suite: Suite, after: tuple[float, float], verdict: str) -> None:
    def both(noises: tuple[float, float]):
        return [
            synthetic.result(suite, Cell("none", 0, "prompts", 1, repeat), noise=noise)
            for repeat, noise in enumerate(noises, 1)
        ]

    comparison = compare(both((0.9, 1.1)), both(after))
    assert [change.verdict for change in comparison.changes] == [verdict]


HERE = Cell("P-EAGLE", 7, "prompts", 4, 1)


def accepted(share: float):
    """Fewer accepted tokens at every position, and nothing else: the counters alone say so."""

    def edit(data) -> None:
        key = "spec_decode_per_position_acceptance_rates"
        data[key] = [round(share * 1000 * rate) / 1000 for rate in data[key]]

    return edit


def times(name: str, factor: float):
    return lambda data: data.update({key: value * factor for key, value in data.items() if name in key})


def another_answer(data) -> None:
    data["generated_texts"] = [*data["generated_texts"][:-1], "another"]


PLANTED = {
    "AL falls": (accepted(0.4), "AL 3.60 -> 2.04"),
    "AL rises, as it does when wrong tokens are accepted": (accepted(1.2), "with the same serving command"),
    "TTFT x10": (times("_ttft_ms", 10), "TTFT p50 20.0 -> 200.0 ms"),
    "the tail of TTFT": (times("p99_ttft_ms", 2), "TTFT p99 20.0 -> 40.0 ms"),
    "TPOT": (times("_tpot_ms", 1.15), "TPOT p50"),
    "the tail of TPOT": (times("p99_tpot_ms", 1.5), "TPOT p99"),
    "no TPOT": (lambda data: data.update(output_lens=[1] * len(data["output_lens"])), "ms -> no sample"),
    "another text": (another_answer, "same text as without speculation 100% -> 91.67%, in float32"),
    "no text": (lambda data: data.update(generated_texts=[]), "same text as without speculation 100% -> unknown"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_regression_fails_the_gate(tmp_path: Path, suite: Suite, planted: str) -> None:
    """Throughput is as before; the cell, and no other, is named with what is wrong."""
    change, text = PLANTED[planted]
    here = HERE.condition

    def edit(cell: Cell, data) -> None:
        if cell.condition == here:
            change(data)

    results(tmp_path / "a", suite, spread=0), results(tmp_path / "b", suite, spread=0, edit=edit)
    done = gate(tmp_path)
    assert done.exit_code == 1
    named = [line for line in done.output.splitlines() if line.startswith(f"{here.label}: ")]
    assert any(text in line for line in named), done.output
    assert "1 worse of 10 compared, 0 failed or missing" in done.output


def test_a_text_that_differs_in_one_repeat_only(suite: Suite) -> None:
    def all_repeats(edit=lambda *_: None):
        cells = [Cell(arm, k, "prompts", 4, r) for arm, k in (("none", 0), ("P-EAGLE", 7)) for r in (1, 2)]
        return [synthetic.result(suite, cell, edit=edit) for cell in cells]

    second = all_repeats(lambda cell, data: another_answer(data) if (cell.k, cell.repeat) == (7, 2) else None)
    assert compare(all_repeats(), second).worse


@pytest.mark.parametrize(
    ("change", "flags", "dtype"), [(another_answer, "", "bfloat16"), (accepted(1.2), "--another", "float32")]
)
def test_no_regression(tmp_path: Path, suite: Suite, change: Callable, flags: str, dtype: str) -> None:
    """Texts may differ where they are not promised; a rise of AL counts only where nothing else explains it."""

    def edit(cell: Cell, data) -> None:
        if cell.k:
            change(data)

    other = suite.model_copy(update={"serve": suite.serve.model_copy(update={"flags": flags})})
    before = results(tmp_path / "a", suite, spread=0, dtype=dtype)
    assert not compare(before, results(tmp_path / "b", other, spread=0, dtype=dtype, edit=edit)).worse


def test_a_failed_cell_is_a_regression(tmp_path: Path, suite: Suite) -> None:
    failed = {f"p-eagle-k7-prompts-c4-r{repeat}": "the server ended" for repeat in (1, 2)}
    before, failed["eagle-3-k3-prompts-c1-r1"] = results(tmp_path / "a", suite), "one repeat"
    comparison = compare(before, results(tmp_path / "b", suite, failed=failed))
    assert comparison.missing == [
        (Condition("P-EAGLE", 7, "prompts", 4), "failed: the server ended"),
        (Condition("EAGLE-3", 3, "prompts", 1), "0 repeats failed before, 1 now"),
    ]
    assert comparison.worse


def test_results_that_are_not_comparable(tmp_path: Path, suite: Suite) -> None:
    before = results(tmp_path / "a", suite, gpu="1 x B200")
    with pytest.raises(ToolError, match="measured on 1 x B200, then on 1 x H200"):
        compare(before, results(tmp_path / "b", suite, gpu="1 x H200"))
    dataset = suite.datasets["prompts"].model_copy(update={"output_tokens": 32})
    shorter = suite.model_copy(update={"datasets": {"prompts": dataset}})
    with pytest.raises(ToolError, match="other prompts or lengths"):
        compare(before, results(tmp_path / "c", shorter, gpu="1 x B200"))


def test_unreadable_results(tmp_path: Path, suite: Suite) -> None:
    synthetic.write(tmp_path / "a", suite)
    file = tmp_path / "a/cells/none-k0-prompts-c1-r1.json"
    file.write_text("{}")
    done = gate(tmp_path)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    line = f"peagle-vllm: {file} is not a result of `bench run` (cell: Field required); delete it, and the same"
    assert done.stderr.startswith(line)
