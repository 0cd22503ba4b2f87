"""Which K a report says to serve: only what was measured, and no more than the noise allows."""

import json
import shlex
from pathlib import Path

import pytest

from peagle_tools.bench.cells import read_results
from peagle_tools.bench.metrics import points
from peagle_tools.bench.report import write_report
from peagle_tools.bench.schedule import advice
from peagle_tools.bench.suite import Suite
from tests.bench import synthetic


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
    write_report(tmp_path / "r")
    assert (tmp_path / "r/report.md").read_text().endswith(f"\n```\n{text[-1]}\n```\n")


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
    write_report(tmp_path / "r")
    shown = (tmp_path / "r/report.md").read_text()
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
