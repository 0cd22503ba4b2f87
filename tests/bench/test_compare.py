"""The regression gate: what is slower beyond noise, and what cannot be compared."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from peagle_vllm.bench import BenchError
from peagle_vllm.bench.cells import Cell, Condition, read_results
from peagle_vllm.bench.compare import compare
from peagle_vllm.bench.suite import Suite, read_suite
from peagle_vllm.cli import app
from tests.bench import synthetic


@pytest.fixture
def suite(suite_file: Path) -> Suite:
    return read_suite(suite_file)


def results(folder: Path, suite: Suite, **changes):
    return read_results(synthetic.write(folder, suite, **changes))


def test_noise_is_no_regression(tmp_path: Path, suite: Suite) -> None:
    found = compare(results(tmp_path / "a", suite, seed=1), results(tmp_path / "b", suite, seed=2))
    assert not found.worse
    assert {change.verdict for change in found.changes} == {"same"}


def test_the_slower_cell_is_named(tmp_path: Path, suite: Suite) -> None:
    after = results(tmp_path / "b", suite, seed=2, slower={("P-EAGLE", 7, 4): 1.1, ("EAGLE-3", 3, 1): 0.9})
    found = compare(results(tmp_path / "a", suite, seed=1), after)
    verdicts = {change.condition: change.verdict for change in found.changes if change.verdict != "same"}
    assert verdicts == {
        Condition("P-EAGLE", 7, "prompts", 4): "slower",
        Condition("EAGLE-3", 3, "prompts", 1): "faster",
    }
    assert found.worse


@pytest.mark.parametrize(("after", "verdict"), [((1.0, 1.2), "same"), ((1.15, 1.3), "slower")])
def test_only_disjoint_spreads_count(suite: Suite, after: tuple[float, float], verdict: str) -> None:
    def both(noises: tuple[float, float]):
        return [
            synthetic.result(suite, Cell("none", 0, "prompts", 1, repeat), noise=noise)
            for repeat, noise in enumerate(noises, 1)
        ]

    found = compare(both((0.9, 1.1)), both(after))
    assert [change.verdict for change in found.changes] == [verdict]


def test_a_failed_cell_is_a_regression(tmp_path: Path, suite: Suite) -> None:
    failed = {f"p-eagle-k7-prompts-c4-r{repeat}": "the server ended" for repeat in (1, 2)}
    found = compare(results(tmp_path / "a", suite), results(tmp_path / "b", suite, failed=failed))
    assert found.lost == [(Condition("P-EAGLE", 7, "prompts", 4), "failed: the server ended")]
    assert found.worse


def test_one_failed_repeat_is_a_regression(tmp_path: Path, suite: Suite) -> None:
    failed = {"p-eagle-k7-prompts-c4-r1": "why"}
    found = compare(results(tmp_path / "a", suite), results(tmp_path / "b", suite, failed=failed))
    assert [condition for condition, _ in found.lost] == [Condition("P-EAGLE", 7, "prompts", 4)]


def test_one_repeat_says_that_noise_is_unknown(tmp_path: Path, suite: Suite) -> None:
    single = suite.model_copy(update={"repeats": 1})
    found = compare(results(tmp_path / "a", single), results(tmp_path / "b", single))
    assert any("noise is unknown" in line for line in found.notes)


def test_other_hardware(tmp_path: Path, suite: Suite) -> None:
    before, after = results(tmp_path / "a", suite, gpu="1 x B200"), results(tmp_path / "b", suite, gpu="1 x H200")
    with pytest.raises(BenchError, match="measured on 1 x B200, then on 1 x H200"):
        compare(before, after)
    assert compare(before, after, other_hardware=True).notes[0].startswith("Beware")


def test_other_lengths(tmp_path: Path, suite: Suite) -> None:
    dataset = suite.datasets["prompts"].model_copy(update={"output_tokens": 32})
    shorter = suite.model_copy(update={"datasets": {"prompts": dataset}})
    with pytest.raises(BenchError, match="other prompts or lengths"):
        compare(results(tmp_path / "a", suite), results(tmp_path / "b", shorter))


@pytest.mark.parametrize(("slower", "status"), [({}, 0), ({("none", 0, 1): 1.5}, 1)])
def test_exit_status(tmp_path: Path, suite: Suite, slower, status: int) -> None:
    synthetic.write(tmp_path / "a", suite, seed=1)
    synthetic.write(tmp_path / "b", suite, seed=2, slower=slower)
    done = CliRunner().invoke(app, ["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert done.exit_code == status
    assert ("none, prompts, c=1: slower, 0.6" in done.output) == bool(status)


def test_unreadable_results(tmp_path: Path, suite: Suite) -> None:
    synthetic.write(tmp_path / "a", suite)
    (tmp_path / "a/cells/none-k0-prompts-c1-r1.json").write_text("{}")
    done = CliRunner().invoke(app, ["bench", "compare", str(tmp_path / "a"), str(tmp_path / "nothing")])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1 and "no cell of a sweep" in done.stderr
