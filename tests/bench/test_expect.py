"""``bench run --expect published``: each AL of the published head, pass or fail. Stand-ins for server and client."""

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from peagle_tools.bench import cli
from peagle_tools.bench.cells import read_results
from peagle_tools.bench.metrics import points
from peagle_tools.bench.published import expected
from peagle_tools.bench.suite import read_suite
from peagle_tools.cli import app
from tests.bench import synthetic

SHIPPED = Path(cli.__file__).with_name("suites") / "gpt-oss-20b.yaml"
PUBLISHED = {("MT-Bench", 3): 2.87, ("MT-Bench", 7): 3.7, ("HumanEval", 3): 3.02, ("HumanEval", 7): 3.94}


def checks(folder: Path, **factors: float):
    """Every figure of the shipped suite, measured as it was published times the factor of ``mt_bench_7`` and so on."""
    suite = read_suite(SHIPPED)

    def edit(cell, data) -> None:
        if cell.arm != "P-EAGLE":
            return
        name = f"{cell.dataset}_{cell.k}".lower().replace("-", "_")
        accepted = round(1000 * (PUBLISHED[cell.dataset, cell.k] * factors.get(name, 1) - 1))
        shares = [(accepted // cell.k + (i < accepted % cell.k)) / 1000 for i in range(cell.k)]
        data |= {"spec_decode_accepted_tokens": accepted, "spec_decode_per_position_acceptance_rates": shares}
        data["spec_decode_num_drafts"] = 1000

    found = points(read_results(synthetic.write(folder, suite, edit=edit)))
    return expected(suite.target, list(suite.datasets), found), found


def test_all_as_published(tmp_path: Path) -> None:
    found, _ = checks(tmp_path / "r")
    assert len(found) == len(PUBLISHED) and all(check.passed for check in found), found
    assert found[0].text == "P-EAGLE K=3, MT-Bench: published AL 2.87, measured 2.87 (+0.0%): pass"


@pytest.mark.parametrize(("factor", "passed"), [(0.96, True), (0.94, False), (1.04, True), (1.06, False)])
def test_the_tolerance_holds_both_ways(tmp_path: Path, factor: float, passed: bool) -> None:
    found, _ = checks(tmp_path / "r", humaneval_7=factor)
    assert [check.passed for check in found] == [True, True, True, passed]
    assert ("FAIL (allowed: 5%)" in found[3].text) != passed


def test_one_bad_concurrency_and_a_figure_that_was_not_measured_do_not_pass(tmp_path: Path) -> None:
    _, good = checks(tmp_path / "a")
    _, bad = checks(tmp_path / "b", mt_bench_3=0.8)
    mixed = [p for p in good if (p.dataset, p.k, p.concurrency) != ("MT-Bench", 3, 8)]
    mixed += [p for p in bad if (p.dataset, p.k, p.concurrency) == ("MT-Bench", 3, 8)]
    target, datasets = "openai/gpt-oss-20b", ["MT-Bench", "HumanEval"]
    assert [check.passed for check in expected(target, datasets, mixed)] == [False, True, True, True]
    without = [p for p in good if (p.arm, p.k) != ("P-EAGLE", 7)]
    assert [check.passed for check in expected(target, datasets, without)] == [True, False, True, False]
    assert not any(check.passed for check in expected(target, datasets, []))


def test_the_command_on_the_shipped_suite(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in's AL is 2.73 at K=3."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # the stand-in needs no `datasets`
    done = CliRunner().invoke(app, ["bench", "run", "--suite", "gpt-oss-20b", "--expect", "published", "--k", "3"])
    assert done.exit_code == 1, done.output
    assert "P-EAGLE K=3, HumanEval: published AL 3.02, measured 2.73 (-9.5%): FAIL" in done.output
    assert "P-EAGLE K=3, MT-Bench: published AL 2.87, measured 2.73 (-4.7%): pass" in done.output
    assert "P-EAGLE K=7, MT-Bench: published AL 3.70, not measured: FAIL" in done.output
    assert done.output.endswith("FAIL: 3 of 4 are not as published\n")
    configured = json.loads((elsewhere / "bench-results/gpt-oss-20b/sweep.json").read_text())["suite"]
    assert configured["arms"]["P-EAGLE"]["speculative_config"]["model"] == "amazon/GPT-OSS-20B-P-EAGLE"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "give SUITE.yaml or --suite NAME, one of them; names: gpt-oss-20b"),
        (["--suite", "gpt"], "--suite gpt: there is none of this name; names: gpt-oss-20b"),
        (["--suite", "gpt-oss-20b", "--expect", "all"], "--expect all: only 'published' can be expected"),
    ],
)
def test_what_cannot_be_expected_is_refused(elsewhere: Path, words: list[str], line: str) -> None:
    done = CliRunner().invoke(app, ["bench", "run", *words])
    assert (done.exit_code, done.stderr) == (2, f"peagle-vllm: {line}\n")


@pytest.mark.parametrize(("name", "extra"), [("vllm", "cuda,bench"), ("datasets", "bench")])
def test_a_missing_package_stops_a_sweep_at_once(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, name: str, extra: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == name else wanted)
    done = CliRunner().invoke(app, ["bench", "run", "--suite", "gpt-oss-20b"])
    line = f'peagle-vllm: {name} is not installed: pip install "peagle-vllm[{extra}]"\n'
    assert (done.exit_code, done.stderr) == (2, line) and not (elsewhere / "bench-results").exists()


def test_a_suite_without_published_figures_is_refused_before_it_runs(elsewhere: Path, suite_file: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "run", str(suite_file), "--expect", "published"])
    assert done.exit_code == 2 and not (elsewhere / "bench-results").exists()
    assert done.stderr == "peagle-vllm: --expect published: no AL of ./target was published on prompts\n"
