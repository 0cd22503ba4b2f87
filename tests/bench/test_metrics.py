"""Formulae, on numbers small enough to check by hand."""

import math
from types import SimpleNamespace

import pytest

from peagle_tools.bench.cells import Cell, CellResult
from peagle_tools.bench.metrics import PERCENTILES, Ratio, Spread, best_depth, metrics_of, points, same_texts
from peagle_tools.bench.suite import read_suite
from peagle_tools.shared.acceptance import Acceptance, from_bench_serve, read_engine
from tests.bench import synthetic


def cell(**raw) -> CellResult:
    return CellResult(
        cell=Cell("P-EAGLE", 3, "d", 2, 1),
        kind="P-EAGLE",
        status="ok",
        reason="",
        configuration={},
        versions={},
        hardware={},
        began="",
        server_start_seconds=1,
        drafts=Acceptance(10, 30, 17, (8, 6, 3)),
        raw={
            "total_output_tokens": 30,
            "duration": 3.0,
            "output_lens": [11, 19],
            "ttfts": [0.1, 0.3],
            "latencies": [1.1, 2.1],
            "output_throughput": 10.0,
            **{f"p{p}_{name}_ms": p for p in PERCENTILES for name in ("ttft", "tpot")},
        }
        | raw,
    )


def test_metrics_by_hand() -> None:
    m = metrics_of(cell())
    assert m.output_tokens_per_second == 10
    assert m.ttft == m.tpot == PERCENTILES
    assert m.acceptance_length == 2.7
    assert m.acceptance == (0.8, 0.6, 0.3)


def test_answers_of_one_token_have_no_tpot() -> None:
    m = metrics_of(cell(output_lens=[1, 1]))
    assert all(math.isnan(value) for value in m.tpot) and m.ttft == PERCENTILES


def test_counters_come_back_whole() -> None:
    """vLLM writes shares; a thousand odd numbers of drafts must give the counts back."""
    for drafts in range(1, 3000, 7):
        counts = [drafts, drafts * 2 // 3, drafts // 7]
        raw = {
            "spec_decode_num_drafts": drafts,
            "spec_decode_draft_tokens": 3 * drafts,
            "spec_decode_accepted_tokens": sum(counts),
            "spec_decode_per_position_acceptance_rates": [count / drafts for count in counts],
        }
        found = from_bench_serve(raw)
        assert found is not None and found.accepted_per_position == tuple(counts)


def test_counters_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="18 accepted tokens"):
        Acceptance(10, 30, 18, (8, 6, 3))


def test_an_engines_counters() -> None:
    """Before the first draft vLLM has no counts by position; without speculation it has no such counters at all."""

    def engine(**counts: int | list[int]) -> SimpleNamespace:
        metrics = [
            SimpleNamespace(name=f"vllm:spec_decode_num_{name}", **{"values" if isinstance(n, list) else "value": n})
            for name, n in counts.items()
        ]
        return SimpleNamespace(get_metrics=lambda: [SimpleNamespace(name="vllm:num_requests", value=7), *metrics])

    one = read_engine(engine(drafts=4, draft_tokens=12, accepted_tokens=5, accepted_tokens_per_pos=[3, 2, 0]))
    two = read_engine(engine(drafts=14, draft_tokens=42, accepted_tokens=22, accepted_tokens_per_pos=[11, 8, 3]))
    assert two.since(one) == Acceptance(10, 30, 17, (8, 6, 3))
    assert two.since(read_engine(engine())) == two
    assert (read_engine(engine()).length, read_engine(engine()).shares) == (1.0, ())


def test_spread_and_ratio() -> None:
    a, b = Spread.of([10, 12, 11]), Spread.of([10.5, 9, 10])
    assert (a.median, a.low, a.high, a.repeats) == (11, 10, 12, 3)
    r = a.over(b)
    assert (r.median, r.low, r.high) == (1.1, 10 / 10.5, 12 / 9)
    assert r.overlaps_one and r.in_doubt
    assert not Ratio(1.2, 1.1, 1.3, 2).in_doubt
    assert Ratio(1.2, 1.2, 1.2, 1).in_doubt  # one repeat shows no spread


def test_points_gather_repeats_and_leave_failures_out(tmp_path, suite_file) -> None:
    from peagle_tools.bench.cells import read_results

    suite = read_suite(suite_file)
    failed = {"p-eagle-k7-prompts-c4-r2": "why", "none-k0-prompts-c1-r1": "x", "none-k0-prompts-c1-r2": "x"}
    found = points(read_results(synthetic.write(tmp_path / "r", suite, failed=failed)))
    by_name = {(p.arm, p.k, p.concurrency): p for p in found}
    assert len(found) == 9  # of 10: both repeats of one failed
    assert (len(by_name["P-EAGLE", 7, 4].cells), by_name["P-EAGLE", 7, 4].repeats) == (1, 2)
    assert by_name["P-EAGLE", 3, 1].acceptance == [0.75, 0.562, 0.422]
    best = best_depth(p for p in found if p.arm == "P-EAGLE" and p.concurrency == 1)
    assert best.k == 7
    assert same_texts(by_name["P-EAGLE", 3, 4], by_name["none", 0, 4]) == 1
