"""The regression gate: what is worse beyond noise, and what cannot be compared."""

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


@pytest.mark.parametrize(("after", "is_worse"), [((1.0, 1.2), False), ((1.15, 1.3), True)])
def test_only_disjoint_spreads_count(suite: Suite, after: tuple[float, float], is_worse: bool) -> None:
    def both(noises: tuple[float, float]):
        return [
            synthetic.result(suite, Cell("none", 0, "prompts", 1, repeat), noise=noise)
            for repeat, noise in enumerate(noises, 1)
        ]

    assert compare(both((0.9, 1.1)), both(after)).worse == is_worse


HERE = Condition("P-EAGLE", 7, "prompts", 4)


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


ONE_REPEAT = "another text, in one repeat"
PLANTED = {
    "throughput": (times("output_throughput", 0.9), "slower, 0.90 of before (0.90..0.90)"),
    "AL falls": (accepted(0.4), "AL 3.60 -> 2.04"),
    "AL rises, as it does when wrong tokens are accepted": (accepted(1.2), "with the same serving command"),
    "TTFT x10": (times("_ttft_ms", 10), "TTFT p50 20.0 -> 200.0 ms"),
    "the tail of TTFT": (times("p99_ttft_ms", 2), "TTFT p99 20.0 -> 40.0 ms"),
    "TPOT": (times("_tpot_ms", 1.15), "TPOT p50"),
    "the tail of TPOT": (times("p99_tpot_ms", 1.5), "TPOT p99"),
    "no TPOT": (lambda data: data.update(output_lens=[1] * len(data["output_lens"])), "ms -> no sample"),
    ONE_REPEAT: (another_answer, "same text as without speculation 100.00% -> 91.67%, in float32"),
    "no text": (lambda data: data.update(generated_texts=[]), "same text as without speculation 100.00% -> unknown"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_regression_fails_the_gate(tmp_path: Path, suite: Suite, planted: str) -> None:
    """The cell, and no other, is named with what is wrong."""
    change, text = PLANTED[planted]

    def edit(cell: Cell, data) -> None:
        if cell.condition == HERE and (cell.repeat == 2 or planted != ONE_REPEAT):
            change(data)

    results(tmp_path / "a", suite, spread=0), results(tmp_path / "b", suite, spread=0, edit=edit)
    done = gate(tmp_path)
    assert done.exit_code == 1
    named = [line for line in done.output.splitlines() if line.startswith(f"{HERE.label}: ")]
    assert any(text in line for line in named), done.output
    assert "1 worse of 10 compared, 0 failed or missing" in done.output


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
    assert comparison.worse
    assert comparison.missing == [
        (HERE, "failed: the server ended"),
        (Condition("EAGLE-3", 3, "prompts", 1), "0 repeats failed before, 1 now"),
    ]


def test_results_that_are_not_comparable(tmp_path: Path, suite: Suite) -> None:
    before = results(tmp_path / "a", suite, gpu="1 x B200")
    with pytest.raises(ToolError, match="measured on 1 x B200, then on 1 x H200"):
        compare(before, results(tmp_path / "b", suite, gpu="1 x H200"))
    dataset = suite.datasets["prompts"].model_copy(update={"output_tokens": 32})
    shorter = suite.model_copy(update={"datasets": {"prompts": dataset}})
    with pytest.raises(ToolError, match="other prompts or lengths"):
        compare(before, results(tmp_path / "c", shorter, gpu="1 x B200"))


def test_unreadable_results(tmp_path: Path, suite: Suite) -> None:
    file = synthetic.write(tmp_path / "a", suite) / "cells/none-k0-prompts-c1-r1.json"
    file.write_text("{}")
    done = gate(tmp_path)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    line = f"peagle-vllm: {file} is not a result of `bench run` (cell: Field required); delete it, and the same"
    assert done.stderr.startswith(line)
