"""The regression gate: what is worse beyond noise, and what cannot be compared."""

from pathlib import Path

import pytest
from typer.testing import Result

from peagle_tools.bench.cells import Cell, Results, read_results
from peagle_tools.bench.compare import compare
from peagle_tools.bench.suite import Suite
from peagle_tools.shared.errors import ToolError
from tests.bench import synthetic
from tests.support.command import only_line, run


def results(folder: Path, suite: Suite, **changes):
    return read_results(synthetic.write(folder, suite, **changes))


def gate(folder: Path) -> Result:
    """``bench compare`` of the results in a and b."""
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
    """Texts may differ where they are not promised, and acceptance may rise."""

    def edit(cell: Cell, data) -> None:
        if cell.k:
            another_answer(data), accepted(1.2)(data)

    before = results(tmp_path / "a", suite, spread=0, dtype="bfloat16")
    after = results(tmp_path / "b", suite, spread=0, dtype="bfloat16", edit=edit)
    assert not any(change.worse for change in compare(before, after))


def test_a_failed_cell_is_a_regression(tmp_path: Path, suite: Suite) -> None:
    failed = {f"p-eagle-k7-prompts-c4-r{repeat}": "the server ended" for repeat in (1, 2)}
    before, failed["eagle-3-k3-prompts-c1-r1"] = results(tmp_path / "a", suite), "one repeat"
    changes = compare(before, results(tmp_path / "b", suite, failed=failed))
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
